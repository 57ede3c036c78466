"""The rollout engine of a rank: in its process, beside it, or none."""

from __future__ import annotations

from rlflow.data.layout import Layout
from rlflow.data.transport import Transport
from rlflow.rollout.engine import RolloutEngine


def engine_of_rank(
    configured: RolloutEngine, layout: Layout, transport: Transport, generates: bool
) -> RolloutEngine | None:
    """What generates on this rank; None where nothing does. A collective of the layout's ranks.

    Args:
        configured: As the config has it.
        layout: Where engines are placed.
        transport: To the other ranks.
        generates: Whether the run needs engines at all.
    """
    if not generates or transport.rank not in layout.ranks:
        return None
    return configured
