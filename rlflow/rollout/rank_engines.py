"""The rollout engines of a rank, by policy: in its process, beside it, or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlflow.databuffer.message import from_message, to_message
from rlflow.databuffer.transport import Transport
from rlflow.errors import about
from rlflow.rollout.assignment import Engines
from rlflow.rollout.beside import EngineBeside, free_address
from rlflow.rollout.engine import RolloutEngine
from rlflow.rollout.engine_in_turns import EngineInTurns
from rlflow.values.layout import Layout


@dataclass(frozen=True)
class RankEngines:
    """What generates on one rank.

    Attributes:
        own: The engines themselves, by the policy that each belongs to; none where no engine is placed.
        by_policy: What each policy that generates here is synced to and generates with.
    """

    own: Mapping[str, RolloutEngine]
    by_policy: Mapping[str, RolloutEngine]

    def check_context(self, prompt: int, response: int) -> None:
        """Refuse lengths beyond what an engine that was set up holds.

        Args:
            prompt: Tokens of the longest prompt.
            response: Tokens of the longest response.

        Raises:
            UserError: They do not fit; names the settings.
        """
        for engine in self.own.values():
            with about(engine):
                engine.check_context(prompt, response)

    def close(self) -> None:
        """Free every engine."""
        for engine in self.own.values():
            engine.close()


def engines_of_rank(engines: Engines, layouts: Mapping[str, Layout], transport: Transport, on_cpu: bool) -> RankEngines:
    """What generates on this rank.

    Args:
        engines: Of all policies, as configured.
        layouts: Where each policy generates.
        transport: To the other ranks; has formed the groups of the ranks that share an engine.
        on_cpu: Whether they run on the CPU.
    """
    beside = engines_beside(engines, layouts, transport.world_size, on_cpu)
    own: dict[str, RolloutEngine] = {}
    by_policy: dict[str, RolloutEngine] = {}
    for policy, engine in engines.own.items():
        if transport.rank not in layouts[policy].ranks:
            continue
        here = _beside_rank(engine, layouts[policy], transport) if policy in beside else engine
        own[policy] = by_policy[policy] = here
        if len(users := engines.users(policy)) > 1:
            turns: dict[str, EngineInTurns] = {}
            by_policy.update({user: EngineInTurns(user, here, turns) for user in users})
    return RankEngines(own, by_policy)


def engines_beside(engines: Engines, layouts: Mapping[str, Layout], world_size: int, on_cpu: bool) -> Sequence[str]:
    """The policies whose engines get processes of their own, on all their ranks; known alike everywhere.

    Those that can only be built by all ranks at once and are placed on some of them, and those that cannot live in one
    process with an engine named before them.

    Args:
        engines: Of all policies, as configured.
        layouts: Where each policy generates.
        world_size: Ranks of the run.
        on_cpu: Whether they run on the CPU.
    """
    beside: list[str] = []
    for policy, engine in engines.own.items():
        inside = [other for name, other in engines.own.items() if name not in beside]
        before = inside[: inside.index(engine)]
        on_some = engine.needs_all_ranks and len(layouts[policy].ranks) < world_size
        if on_some or not all(engine.shares_process(other, on_cpu) for other in before):
            beside.append(policy)
    return tuple(beside)


def _beside_rank(engine: RolloutEngine, layout: Layout, transport: Transport) -> RolloutEngine:
    """The engine in a process of its own, which its peers' meet."""
    peers = layout.peers(layout.shard(transport.rank))
    address = to_message(free_address().encode()) if transport.rank == peers[0] else None
    received = transport.broadcast_bytes(address, peers[0], peers)
    index = peers.index(transport.rank)
    return EngineBeside(engine, index=index, size=len(peers), address=from_message(received).decode())
