"""How a step is filled: draws until enough groups are there, and what is left over for the next step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlflow.checkpoint.kept_rows import SURPLUS
from rlflow.controller.failures import left_out
from rlflow.controller.in_step import InStep
from rlflow.controller.step_state import Keep
from rlflow.dag.graph import Graph
from rlflow.dag.node import BATCH
from rlflow.dag.planner import Plan
from rlflow.dag.tasks import Fill, RunNode
from rlflow.databuffer.kept import Kept
from rlflow.databuffer.transport import Transport
from rlflow.errors import UserError
from rlflow.values.host_copy import on_host

NOT_BOOL = 2  # beside 0 and 1, what a filter may answer


class Filling:
    """Fills steps with the groups that a filter keeps, or whose responses have ended; ranks of a `Fill` count alike.

    Args:
        graph: With a filter or not.
        plan: Of all ranks.
        transport: To the other ranks.
        needed: Groups of a step.
        max_draws: Draws for one step at most, counted by the groups that a filter was asked about.
        keep: Keeps rows and values of this rank.

    Attributes:
        surplus: Groups that were there beyond the last step's, with their values; they open the next. None without.
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        transport: Transport,
        needed: int,
        max_draws: int,
        keep: Keep,
    ) -> None:
        self.surplus: Kept | None = None
        self._graph = graph
        self._layouts = plan.layouts()
        self._members = () if plan.fill is None else plan.fill.members
        repeated = () if plan.fill is None else plan.fill.tasks
        runs = [graph.nodes[task.node_id] for task in repeated if isinstance(task, RunNode)]
        spaces = [BATCH, *(node.id for node in runs if node.makes_rows)]
        keeps = () if plan.fill is None else plan.fill.keeps
        self._keeping = keep(spaces, keeps)
        self._transport = transport
        self._needed = needed
        self._max_draws = max_draws

    def run(self, fill: Fill, now: InStep, draw: Callable[[], bool]) -> None:
        """Draw until the step is full; then its rows and values are in place, as if drawn at once.

        Args:
            fill: What is repeated.
            now: Holds the rows and values of a draw, and gets those of the step.
            draw: Runs it once, on the next prompts; says whether any group went through it, or all were held back.

        Raises:
            UserError: The filter did not answer with one bool a row, equal within a group; or it kept too few groups.
        """
        parts = [] if self.surplus is None else [self.surplus]
        count = sum(len(part.roots) for part in parts)
        kept = drawn = draws = 0
        while count < self._needed:
            if fill.filter_id is not None and drawn >= self._max_draws * self._needed:
                raise UserError(_never_fills(fill.filter_id, count, self._needed, draws, kept / drawn))
            draws += 1
            if not draw():
                continue
            drawing = self._keeping.of(now)
            groups = drawing.roots if fill.filter_id is None else self._chosen(fill.filter_id, fill.members, now)
            for name in (*fill.keeps, fill.filter_id):
                if name is not None and now.buffer.holds(name):
                    now.buffer.free(name)
            parts.append(drawing.only(groups))
            drawn += len(drawing.roots)
            kept += len(groups)
            count += len(groups)
        filled = Kept.joined(parts)
        step, left = filled.roots.tensor_split([self._needed])
        self._keeping.put(filled.only(step), now)
        self.surplus = filled.only(left) if len(left) else None
        if fill.filter_id is not None and drawn:
            now.metrics.mean("filter/kept", float(kept), float(drawn))
        now.metrics.number(f"{self.part}/draws", float(draws))
        now.metrics.number(f"{self.part}/surplus", float(len(left)))

    @property
    def part(self) -> str:
        """The part of the metrics that say how steps are filled."""
        return "rollout" if self._graph.filter is None else "filter"

    def restore(self, read: Callable[[str, Kept], Kept | None]) -> None:
        """Take back the surplus that `read` finds by its name, told what it is made of."""
        if self._transport.rank in self._members:
            self.surplus = read(SURPLUS, self._keeping.empty())

    def _chosen(self, filter_id: str, members: tuple[int, ...], now: InStep) -> Tensor:
        """The ids of the groups that the filter keeps, ascending."""
        layout, space = self._layouts[filter_id], now.spaces[self._graph.space_of(filter_id)]
        answer, found = torch.empty(0, dtype=torch.uint8), "something"  # elsewhere
        if self._transport.rank in layout.ranks:
            here: Tensor = now.buffer.get(filter_id, layout)
            found = f"{str(here.dtype).removeprefix('torch.')} of shape {list(here.shape)}"
            is_bool = here.dtype == torch.bool and here.dim() == 1
            answer = on_host(here).to(torch.uint8) if is_bool else torch.full((len(here),), NOT_BOOL, dtype=torch.uint8)
        answers = space.gathered(layout, answer, self._transport, members)
        if bool((answers == NOT_BOOL).any()):
            raise UserError(
                f"filter `{filter_id}` returned {found}; return one bool a row, `[B]`, such as a comparison gives"
            )
        out = left_out(space, self._graph.nodes[filter_id], now, self._graph)
        counted = slice(None) if out is None else ~out
        return kept_groups(filter_id, answers.bool()[counted], space.roots[counted])


def kept_groups(filter_id: str, answers: Tensor, groups: Tensor) -> Tensor:
    """The groups whose rows are kept, ascending.

    Args:
        filter_id: For the error.
        answers: `[N]` bool.
        groups: `[N]`, the group of each row.

    Raises:
        UserError: Some rows of a group are kept and others are not.
    """
    ids, member, sizes = groups.unique(return_inverse=True, return_counts=True)
    kept = torch.zeros_like(sizes).index_add_(0, member, answers.long())
    torn = (kept > 0) & (kept < sizes)
    if bool(torn.any()):
        first = int(torn.nonzero()[0])
        raise UserError(
            f"filter `{filter_id}` keeps {int(kept[first])} of the {int(sizes[first])} samples of group"
            f" {int(ids[first])}; groups are kept whole, so return the same for all samples of a prompt"
        )
    chosen: Tensor = ids[kept > 0]
    return chosen


def _never_fills(filter_id: str, count: int, needed: int, draws: int, share: float) -> str:
    return (
        f"filter `{filter_id}` has kept {count} of the {needed} groups of a step after {draws} draws"
        f" (`module.max_draws`), {share:.1%} of those drawn; raise that, choose easier or harder prompts, or take more"
        " samples of each"
    )
