"""How prompts are drawn: loaded, repeated until a step is full, and held back while their responses are cut off."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlflow.checkpoint.kept_rows import SURPLUS, UNDER_WAY
from rlflow.controller.failures import left_out
from rlflow.controller.run import Run
from rlflow.controller.step_state import InStep, Keep
from rlflow.controller.steps import Steps
from rlflow.dag.graph import Graph
from rlflow.dag.node import BATCH
from rlflow.dag.planner import Plan
from rlflow.dag.tasks import Fill, HoldBack, Load, RunNode, Task
from rlflow.data.loader import Prefetch
from rlflow.databuffer.kept import Kept
from rlflow.databuffer.message import to_message
from rlflow.databuffer.transport import Transport
from rlflow.errors import UserError
from rlflow.rollout.sampling import Part
from rlflow.values.batch import Batch
from rlflow.values.columns import to_device
from rlflow.values.host_copy import on_host
from rlflow.values.layout import Layout
from rlflow.values.rollout import Rollout


class Draws:
    """Draws prompts for steps.

    Args:
        run: The run on this rank.
        loader: Loader of the training rows.
        steps: Steps in progress.

    Attributes:
        count: How often prompts were drawn, the draw in progress included.
        repeats: Whether a step takes as many draws as it needs.
        partial: Holds back responses that are cut off; None where none are.
    """

    def __init__(self, run: Run, loader: Prefetch, steps: Steps) -> None:
        self.count = 0
        self.repeats = run.plan.fill is not None
        self._run = run
        self._loader = loader
        self._transport = run.transport
        self._device = run.strategy.root_device
        self._steps = steps
        self.partial: PartialRollout | None = None
        keep, longest = run.keeping, run.max_tokens_per_draw
        self._filling = Filling(run.graph, run.plan, run.transport, loader.prompts_per_step, run.module.max_draws, keep)
        for task in run.plan.every():
            if isinstance(task, HoldBack) and longest is not None:
                self.partial = PartialRollout(run.plan, task, run.transport, longest, keep)

    def part_of(self, node_id: str) -> Part | None:
        """How far the responses of a node get; None where they are not cut off."""
        return None if self.partial is None else self.partial.part_of(node_id)

    def load(self, task: Load, now: InStep) -> None:
        """Read this rank's rows of a draw."""
        layout = task.layout
        self._begin(now.draw, layout)
        batch, ids = self._loader.batch(now.draw, layout.shard(self._transport.rank), layout.shards)
        lengths = batch.lengths if isinstance(batch, Batch) else torch.zeros_like(ids)  # of pairs nothing is per token
        space = self._steps.gather(BATCH, layout, now, ids[:, None], lengths=lengths, tokens=batch.tokens)
        on_device = to_device(batch, self._device)
        now.buffer.put(BATCH, on_device, self._run.graph.type_of(BATCH), space, layout)
        if self.partial is not None:
            self.partial.join(now)

    def fill(self, task: Fill, now: InStep, run: Callable[[Task, int], None]) -> None:
        """Repeat tasks on the next draw until the step's groups are there.

        Args:
            task: What is repeated.
            now: The step.
            run: Runs one task.
        """
        self._filling.run(task, now, lambda: self._draw(task, now, run))
        if self.partial is not None:
            held = self.partial.held
            now.metrics.number("rollout/under_way", 0.0 if held is None else float(len(held.roots)))

    def log(self, now: InStep) -> None:
        """How many draws there were, on ranks that count them."""
        if self.repeats:
            now.metrics.largest(self._total, float(self.count))

    def learn(self, reduced: dict[str, float]) -> None:
        """Take the count from the metrics of a step, on ranks without a part in drawing."""
        self.count = int(reduced.get(self._total, self.count))

    def kept(self) -> dict[str, Kept]:
        """Groups beyond a step's, and those that are held back, by name."""
        found = {SURPLUS: self._filling.surplus, UNDER_WAY: None if self.partial is None else self.partial.held}
        return {name: rows for name, rows in found.items() if rows is not None}

    def restore(self, count: int, read: Callable[[str, Kept], Kept | None]) -> None:
        """Go on after `count` draws, with what `read` finds of `kept`."""
        self.count = count
        self._filling.restore(read)
        if self.partial is not None:
            self.partial.restore(read)

    @property
    def _total(self) -> str:
        return f"{self._filling.part}/draws_total"

    def _draw(self, task: Fill, now: InStep, run: Callable[[Task, int], None]) -> bool:
        """The tasks of a `Fill` on the next prompts; whether any group went through all of them."""
        now.draw = self.count
        self.count += 1
        for repeated in task.tasks:
            run(repeated, now.step)
            if isinstance(repeated, HoldBack) and self.partial is not None and self.partial.all_held:
                return False
        return True

    def _begin(self, draw: int, layout: Layout) -> None:
        """Let the module choose the rows of the epoch that begins with this draw, if one does."""
        epoch = self._loader.begin(draw)
        if epoch is None:
            return
        ranks = self._transport.all_gather(to_message(epoch.digest), layout.ranks)
        if any(not torch.equal(ranks[0], other) for other in ranks):
            raise UserError(
                f"`choose_prompts` chose other rows of epoch {epoch.number + 1} on other ranks; let them follow from"
                " `epoch`, the prompts that it is given and the module's memories alone"
            )


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
        self._members = () if plan.fill is None else plan.fill.ranks
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
            groups = drawing.roots if fill.filter_id is None else self._chosen(fill.filter_id, fill.ranks, now)
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


class PartialRollout:
    """The groups that are under way between two draws, with their prompts, on the ranks that began them.

    Args:
        plan: Of all ranks; it holds back what `task` names.
        task: What is held back.
        transport: To the other ranks.
        max_tokens: By which a response grows in one draw at most.
        keep: Keeps rows and values of this rank.

    Attributes:
        held: Groups with responses that were cut off; None without.
        all_held: Whether the last draw left no group to go on with.
    """

    def __init__(self, plan: Plan, task: HoldBack, transport: Transport, max_tokens: int, keep: Keep) -> None:
        self.held: Kept | None = None
        self.all_held = False
        self._task = task
        self._layout = plan.layouts()[task.node_id]
        self._transport = transport
        self._max_tokens = max_tokens
        samples = [BATCH, task.node_id]
        self._prompts = keep([BATCH], [BATCH])
        self._samples = keep(samples, samples)

    def join(self, now: InStep) -> None:
        """Put the prompts of the groups under way before those just loaded; called by the ranks that load."""
        if self.held is not None:
            prompts = Kept(self.held.rank, {BATCH: self.held.spaces[BATCH]}, {BATCH: self.held.values[BATCH]})
            self._prompts.put(Kept.joined([prompts, self._prompts.of(now)]), now)

    def part_of(self, node_id: str) -> Part | None:
        """How far the responses of a node get; None where they are not cut off."""
        if node_id != self._task.node_id:
            return None
        begun: Rollout | None = None if self.held is None else self.held.values[node_id].rows
        return Part(self._max_tokens, begun)

    def hold_back(self, now: InStep, under_way: Tensor | None) -> None:
        """Leave the step the groups whose responses have all ended, and hold back the others.

        Args:
            now: Has the samples of this draw, and of those before that were under way.
            under_way: `[B]` bool, which of this rank's were cut off; None where `generate` was not asked.
        """
        drawn = self._samples.of(now)
        space = now.spaces[self._task.node_id]
        if under_way is None:
            under_way = torch.zeros(len(space.held(self._layout, self._transport.rank)), dtype=torch.bool)
        here = under_way.to("cpu", torch.uint8)
        cut_off = space.gathered(self._layout, here, self._transport, self._task.ranks).bool()
        waiting = space.roots[cut_off].unique()
        ended = drawn.roots[~torch.isin(drawn.roots, waiting)]
        self.held = drawn.only(waiting) if len(waiting) else None
        self.all_held = not len(ended)
        self._samples.put(drawn.only(ended), now)

    def restore(self, read: Callable[[str, Kept], Kept | None]) -> None:
        """Take back what was held, which `read` finds by its name, told what it is made of."""
        if self._transport.rank in self._task.ranks:
            self.held = read(UNDER_WAY, self._samples.empty())
