"""The rollout engine of a rank: in its process, beside it, or none."""

from __future__ import annotations

from rlflow.databuffer.message import from_message, to_message
from rlflow.databuffer.transport import Transport
from rlflow.rollout.beside import EngineBeside, free_address
from rlflow.rollout.engine import RolloutEngine
from rlflow.values.layout import Layout


def engine_of_rank(configured: RolloutEngine, layout: Layout, transport: Transport) -> RolloutEngine | None:
    """What generates on this rank; None where no engine is placed.

    An engine that can only be built by all ranks at once gets a process of its own where it is placed on some of them.

    Args:
        configured: As the config has it.
        layout: Where engines are placed.
        transport: To the other ranks; has formed the groups of the ranks that share an engine.
    """
    rank = transport.rank
    if rank not in layout.ranks:
        return None
    if not configured.needs_all_ranks or len(layout.ranks) == transport.world_size:
        return configured
    peers = layout.peers(layout.shard(rank))
    address = to_message(free_address().encode()) if rank == peers[0] else None
    heard = transport.broadcast_bytes(address, peers[0], peers)
    return EngineBeside(configured, index=peers.index(rank), size=len(peers), address=from_message(heard).decode())
