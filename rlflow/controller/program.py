"""What a controller runs: the algorithm, its graph and plan, and what rows follow from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rlflow.controller.bad_updates import BadUpdates
from rlflow.controller.step_state import Keeping
from rlflow.dag.graph import Graph
from rlflow.dag.planner import Plan
from rlflow.databuffer.balance import Balance
from rlflow.module import RLModule
from rlflow.values.layout import Layout


@dataclass(frozen=True)
class Program:
    """The same on every rank, but for `rank`.

    Attributes:
        module: The algorithm; its handles are attached to the strategy already.
        graph: Of the module.
        plan: Of all ranks.
        rank: This one.
        steps: Of the run.
        seed: Of the run.
        balance: Whether rows may move to even out tokens.
        max_tokens_per_draw: By which a response grows at most before it is cut off; None where none is.
        bad_updates: When an update is not made.
    """

    module: RLModule
    graph: Graph
    plan: Plan
    rank: int
    steps: int
    seed: int
    balance: Balance
    max_tokens_per_draw: int | None = None
    bad_updates: BadUpdates = BadUpdates()  # noqa: RUF009 - frozen

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """Where each value is made."""
        return self.plan.layouts()

    def keeping(self, spaces: Sequence[str], values: Sequence[str]) -> Keeping:
        """How these rows and values are kept for later steps."""
        return Keeping(self.graph, self.plan, self.rank, spaces, values, seed=self.seed, balance=self.balance)
