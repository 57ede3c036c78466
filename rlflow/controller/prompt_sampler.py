"""The prompts of a step: they are drawn, and drawn again until the step is full; the rest is carried over.

Two kinds of groups are carried from one draw to the next: groups beyond those that a step needs (`surplus`), and groups
with responses that `trainer.partial_rollout` cut off (`unfinished`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlflow.checkpoint.stored_groups import SURPLUS, UNFINISHED
from rlflow.controller.run import Run
from rlflow.controller.step import Step, no_groups
from rlflow.dag.node import BATCH
from rlflow.dag.tasks import DeferUnfinished, DynamicSampling, Load, RunNode, Task
from rlflow.data.loader import Prefetch
from rlflow.databuffer.groups import Groups, ReadGroups
from rlflow.databuffer.transport import to_message
from rlflow.errors import UserError
from rlflow.rollout.sampling import Part
from rlflow.values.batch import Batch
from rlflow.values.columns import to_device
from rlflow.values.host_copy import on_host
from rlflow.values.layout import Layout

NOT_BOOL = 2  # in place of 0 and 1, for a filter whose value is not bool


class PromptSampler:
    """Draws prompts for steps.

    Args:
        run: The run on this rank.
        loader: Loader of the training rows.

    Attributes:
        count: Number of draws of prompts, the draw in progress included.
        repeats: Whether a step takes as many draws as it needs.
        surplus: Groups beyond those of the last step, with their values; the next step begins with them. None for none.
        unfinished: Groups with responses that were cut off, with their prompts, on the ranks that generated them; the
            next draw continues them. None for none.
    """

    def __init__(self, run: Run, loader: Prefetch) -> None:
        self.count = 0
        self.repeats = run.plan.dynamic_sampling is not None
        self.surplus: Groups | None = None
        self.unfinished: Groups | None = None
        self._run = run
        self._loader = loader
        self._transport = run.transport
        self._any_finished = True  # whether all responses of some group had ended in the last draw
        repeated_sampling = run.plan.dynamic_sampling
        repeated = () if repeated_sampling is None else repeated_sampling.tasks
        self._cuts = (
            None if run.replays else next((task for task in repeated if isinstance(task, DeferUnfinished)), None)
        )
        # Groups without rows, which name the spaces and values of groups that are carried over. For the surplus: all
        # rows that a draw makes, and the values that later tasks read. For unfinished groups: prompts and samples.
        self._of_step = self._samples = no_groups(run, [], [])
        if repeated_sampling is not None:
            runs = [run.graph.nodes[task.node_id] for task in repeated if isinstance(task, RunNode)]
            of_step = [BATCH, *(node.id for node in runs if node.makes_rows)]
            self._of_step = no_groups(run, of_step, repeated_sampling.keeps)
        if self._cuts is not None:
            samples = [BATCH, self._cuts.node_id]
            self._samples = no_groups(run, samples, samples)

    @property
    def cuts_off(self) -> bool:
        """Whether long responses are cut off and continued with the next draw."""
        return self._cuts is not None

    def part_of(self, node_id: str) -> Part | None:
        """Most tokens that a draw generates for a response of a node, and responses to continue; None for no limit."""
        longest = self._run.settings.partial_rollout
        if self._cuts is None or node_id != self._cuts.node_id or longest is None:
            return None
        return Part(longest, None if self.unfinished is None else self.unfinished.values[node_id].rows)

    def load(self, task: Load, step: Step) -> None:
        """Read this rank's rows of a draw; prompts of unfinished groups come before them."""
        layout = task.layout
        self._choose(step, layout)
        batch, ids = self._loader.batch(step.draw, layout.shard(self._transport.rank), layout.shards)
        for dataset, of_it in self._run.train.masks(batch.rows).items():
            step.metrics.mean(f"data/{dataset}/share", float(of_it.sum()), float(len(of_it)))
        lengths = batch.lengths if isinstance(batch, Batch) else torch.zeros_like(ids)  # pairs have no values per token
        space = step.gather(BATCH, layout, ids[:, None], lengths, batch.tokens)
        on_device = to_device(batch, self._run.strategy.root_device)
        step.buffer.put(BATCH, on_device, self._run.graph.type_of(BATCH), space, layout)
        if (held := self.unfinished) is not None:
            prompts = Groups(held.rank, {BATCH: held.spaces[BATCH]}, {BATCH: held.values[BATCH]})
            step.put(Groups.joined([prompts, step.groups(prompts)]))

    def defer_unfinished(self, task: DeferUnfinished, step: Step) -> None:
        """Hold back groups with unfinished responses for the next draw; the step has the other groups afterwards.

        Args:
            task: Task that names the rollout node.
            step: Step with the samples of this draw, continued ones included.
        """
        layout, rank = self._run.value_layouts[task.node_id], self._transport.rank
        drawn, space = step.groups(self._samples), step.spaces[task.node_id]
        none = torch.zeros(len(space.held(layout, rank)), dtype=torch.bool)
        cut_off = none if step.cut_off is None else step.cut_off
        of_all = space.gathered(layout, cut_off.to("cpu", torch.uint8), self._transport, task.ranks).bool()
        waiting = space.roots[of_all].unique()
        ended = drawn.roots[~torch.isin(drawn.roots, waiting)]
        self.unfinished = drawn.only(waiting) if len(waiting) else None
        self._any_finished = len(ended) > 0
        step.put(drawn.only(ended))

    def sample_until_full(self, task: DynamicSampling, step: Step, run: Callable[[Task, int], None]) -> None:
        """Draw prompts until the step has all its groups, which it then has as if one draw had brought them.

        Args:
            task: Task with the tasks that are repeated with each draw.
            step: Step that has the rows and values of a draw, and in the end those of the whole step.
            run: Runs one task.

        Raises:
            UserError: The filter did not return one bool a row, equal within a group; or it kept too few groups.
        """
        needed, most = self._run.data.prompts_per_step, self._run.module.max_draws
        parts = [] if self.surplus is None else [self.surplus]
        count = sum(len(part.roots) for part in parts)
        kept = drawn = draws = 0
        while count < needed:
            if task.filter_id is not None and drawn >= most * needed:
                raise UserError(_never_fills(task.filter_id, count, needed, draws, kept / drawn))
            draws += 1
            if not self._draw(task, step, run):
                continue
            drawing = step.groups(self._of_step)
            groups = drawing.roots if task.filter_id is None else self._chosen(task.filter_id, task.ranks, step)
            for name in (*task.keeps, task.filter_id):
                if name is not None and step.buffer.holds(name):
                    step.buffer.free(name)
            parts.append(drawing.only(groups))
            drawn += len(drawing.roots)
            kept += len(groups)
            count += len(groups)
        filled = Groups.joined(parts)
        of_step, left = filled.roots.tensor_split([needed])
        step.put(filled.only(of_step))
        self.surplus = filled.only(left) if len(left) else None
        if task.filter_id is not None and drawn:
            step.metrics.mean("filter/kept", float(kept), float(drawn))
        step.metrics.number(f"{self._part}/draws", float(draws))
        step.metrics.number(f"{self._part}/surplus", float(len(left)))
        if self.cuts_off:
            unfinished = 0 if self.unfinished is None else len(self.unfinished.roots)
            step.metrics.number("rollout/unfinished_groups", float(unfinished))

    def log(self, step: Step) -> None:
        """Log the number of draws, on ranks that count them."""
        if self.repeats:
            step.metrics.largest(f"{self._part}/draws_total", float(self.count))

    def learn(self, reduced: dict[str, float]) -> None:
        """Take the number of draws from a step's metrics, on ranks that do not draw prompts."""
        self.count = int(reduced.get(f"{self._part}/draws_total", self.count))

    def carried_over(self) -> dict[str, Groups]:
        """The surplus and the unfinished groups, by the name under which a checkpoint has them."""
        found = {SURPLUS: self.surplus, UNFINISHED: self.unfinished}
        return {name: groups for name, groups in found.items() if groups is not None}

    def take_over(self, read: ReadGroups) -> None:
        """Restore the groups of `carried_over`."""
        repeated_sampling, rank = self._run.plan.dynamic_sampling, self._transport.rank
        if repeated_sampling is not None and rank in repeated_sampling.ranks:
            self.surplus = read(SURPLUS, self._of_step)
        if self._cuts is not None and rank in self._cuts.ranks:
            self.unfinished = read(UNFINISHED, self._samples)

    @property
    def _part(self) -> str:
        """First part of the names of metrics about draws: `filter` or `rollout`."""
        return "rollout" if self._run.graph.filter is None else "filter"

    def _draw(self, task: DynamicSampling, step: Step, run: Callable[[Task, int], None]) -> bool:
        """Run the repeated tasks on the next prompts; returns whether any group went through all of them."""
        step.draw = self.count
        self.count += 1
        for repeated in task.tasks:
            run(repeated, step.number)
            if isinstance(repeated, DeferUnfinished) and not self._any_finished:
                return False
        return True

    def _choose(self, step: Step, layout: Layout) -> None:
        """If an epoch begins with the step's draw, let the module choose its rows."""
        chosen = self._run.train.chosen
        epoch = None if chosen is None else chosen.begin(step.draw)
        if epoch is None:
            return
        step.metrics.number("data/chosen", len(epoch.rows) / self._run.train.size)
        if (curriculum := self._run.module.data_curriculum) is not None:
            too_hard, too_easy = curriculum.shares(self._run.train.offered)
            step.metrics.number("curriculum/too_hard", too_hard)
            step.metrics.number("curriculum/too_easy", too_easy)
        ranks = self._transport.all_gather(to_message(epoch.digest), layout.ranks)
        if any(not torch.equal(ranks[0], other) for other in ranks):
            raise UserError(
                f"`choose_prompts` chose other rows of epoch {epoch.number + 1} on other ranks; let them follow from"
                " `epoch`, the prompts that it is given and the module's memories alone"
            )

    def _chosen(self, filter_id: str, members: tuple[int, ...], step: Step) -> Tensor:
        """The ids of the groups that the filter keeps, ascending."""
        graph, layout = self._run.graph, self._run.value_layouts[filter_id]
        space = step.spaces[graph.space_of(filter_id)]
        answer, found = torch.empty(0, dtype=torch.uint8), "something"  # on ranks without the filter
        if self._transport.rank in layout.ranks:
            here: Tensor = step.buffer.get(filter_id, layout)
            found = f"{str(here.dtype).removeprefix('torch.')} of shape {list(here.shape)}"
            is_bool = here.dtype == torch.bool and here.dim() == 1
            answer = on_host(here).to(torch.uint8) if is_bool else torch.full((len(here),), NOT_BOOL, dtype=torch.uint8)
        answers = space.gathered(layout, answer, self._transport, members)
        if bool((answers == NOT_BOOL).any()):
            raise UserError(
                f"filter `{filter_id}` returned {found}; return one bool a row, `[B]`, such as a comparison gives"
            )
        out = step.left_out(space, graph.nodes[filter_id])
        counted = slice(None) if out is None else ~out
        return kept_groups(filter_id, answers.bool()[counted], space.roots[counted])


def kept_groups(filter_id: str, answers: Tensor, groups: Tensor) -> Tensor:
    """The groups that the filter keeps in the step, ascending.

    Args:
        filter_id: Name of the filter, for the error.
        answers: `[N]` bool, the filter's answer for each row.
        groups: `[N]`, the group of each row.

    Raises:
        UserError: The filter keeps some rows of a group and not others.
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
