"""`Step`: what one step has on one rank while it lasts, and what of it is carried over into another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlflow.checkpoint.stored_groups import step_name
from rlflow.controller.run import Run
from rlflow.dag.node import BATCH
from rlflow.dag.tasks import Exchange, Load, RunNode, Task, Tell, TrainNode
from rlflow.databuffer.buffer import DataBuffer
from rlflow.databuffer.groups import Groups, GroupValue, ReadGroups, space_without_rows
from rlflow.databuffer.rows import RowSpace, space_from_message, space_to_message
from rlflow.metrics import Metrics, StepMetrics
from rlflow.values.layout import Layout


@dataclass
class Step:
    """A step in progress on one rank.

    In the middle of the second step of a GRPO run, after its rewards:

        number     1
        draw       1, or more where a filter has asked for more prompts
        spaces     {"batch": 32 prompts, "rollout": 256 samples below them}
        buffer     "batch", "rollout" and "rewards", where this rank made or reads them
        metrics    "rollout/length", "reward/mean", "time/rollout", ... of this rank

    Attributes:
        number: Number of the step, from 0.
        buffer: Its values.
        metrics: What this rank logs of it.
        spaces: Its rows by name, those that this rank has to do with.
        draw: Number of the last draw of prompts that it was made of, from 0.
        cut_off: `[B]` bool, which of the responses that this rank has just sampled are unfinished, see
            `trainer.partial_rollout`; None where none is cut off.
    """

    number: int
    buffer: DataBuffer
    metrics: StepMetrics
    spaces: dict[str, RowSpace] = field(default_factory=dict)
    draw: int = 0
    cut_off: Tensor | None = None

    def free(self, names: Sequence[str]) -> None:
        """Forget values that nobody reads any more."""
        for name in names:
            self.buffer.free(name)


class Carried:
    """Rows and values that one step hands on to another, or to a checkpoint, as groups.

    A filter's surplus, responses that are unfinished, and steps that are generated and not trained are all carried so:

        carried = Carried(run, spaces=["batch", "rollout"], values=["rollout", "rewards"])
        drawn = carried.of(step)                    # all groups of this step
        self.surplus = drawn.only(beyond)           # kept until the next one
        carried.put(Groups.joined([self.surplus, carried.of(step)]), step)

    Args:
        run: The run on this rank.
        spaces: Names of the rows.
        values: Names of the values.
    """

    def __init__(self, run: Run, spaces: Sequence[str], values: Sequence[str]) -> None:
        self._run = run
        self._spaces = spaces
        self._values = values

    def of(self, step: Step) -> Groups:
        """All groups of a step whose rows this rank knows; rows of values where they were made."""
        run, values = self._run, {}
        for name in self._values:
            layout, space = run.value_layouts[name], run.graph.space_of(name)
            if space in step.spaces:
                rows = step.buffer.get(name, layout) if run.rank in layout.ranks else None
                values[name] = GroupValue(run.graph.type_of(name), space, layout, rows)
        return Groups(run.rank, {name: step.spaces[name] for name in self._spaces if name in step.spaces}, values)

    def empty(self) -> Groups:
        """Groups of these names without rows."""
        run = self._run
        spaces = {name: space_without_rows(run.graph.levels(name), run.value_layouts[name]) for name in self._spaces}
        values = {
            name: GroupValue(run.graph.type_of(name), run.graph.space_of(name), run.value_layouts[name], None)
            for name in self._values
        }
        return Groups(run.rank, spaces, values)

    def put(self, groups: Groups, step: Step) -> None:
        """Give a step these groups in place of its own, as if it had made them itself."""
        for name, space in groups.spaces.items():
            step.spaces[name] = self._run.in_step(space, step.number)
        for name, value in groups.values.items():
            step.buffer.put(name, value.rows, value.annotation, step.spaces[value.space], value.layout)


class Steps:
    """The steps in progress on one rank: several where the plan overlaps them, one otherwise.

    Args:
        run: The run on this rank.
        metrics: Metrics of this rank.
    """

    def __init__(self, run: Run, metrics: Metrics) -> None:
        self._run = run
        self._transport = run.transport
        self._metrics = metrics
        self._steps: dict[int, Step] = {}
        # What crosses from ranks that generate ahead to those that train.
        ahead = [task for task in run.plan.every() if isinstance(task, Load | RunNode) and not task.lag]
        behind = {task.node_id for task in run.plan.every() if isinstance(task, RunNode | TrainNode) and task.lag}
        runs = [task.node_id for task in ahead if isinstance(task, RunNode)]
        read = {name for node in behind for name in run.graph.nodes[node].reads}
        self._crossing = run.plan.crossing()
        self._generates = bool(self._crossing) and any(run.rank in task.ranks for task in ahead)
        self._carried = Carried(
            run,
            [BATCH, *(name for name in runs if run.graph.nodes[name].makes_rows)],
            [name for name in (BATCH, *runs) if name in read],
        )

    def __getitem__(self, step: int) -> Step:
        return self._steps[step]

    def begin(self, step: int, draw: int) -> None:
        """Make room for a step's rows, the first of which are those of `draw`."""
        self._steps[step] = Step(step, DataBuffer(self._transport), self._metrics.of(step), draw=draw)

    def end(self, step: int) -> None:
        """Let go of a step that was trained."""
        self._steps.pop(step).buffer.clear()

    def clear(self) -> None:
        """Let go of all: the run ends before they are trained."""
        for step in self._steps.values():
            step.buffer.clear()

    def log_exchanges(self, step: Step) -> None:
        """What a step's values took to travel, and to hold with those of the other steps."""
        buffer, metrics = step.buffer, step.metrics
        metrics.sum("exchange/bytes", buffer.bytes_sent)
        metrics.largest("exchange/busiest_rank_bytes", max(buffer.bytes_sent, buffer.bytes_received))
        held = sum(each.buffer.peak_held_bytes for each in self._steps.values())
        metrics.largest("exchange/held_bytes_max", held)
        metrics.seconds("time/exchange_wait", buffer.waited_s)
        if predicted := [space.predicted for space in step.spaces.values()]:
            metrics.largest("balance/predicted_gain_s", sum(each.gain_s for each in predicted))
            metrics.largest("balance/predicted_cost_s", sum(each.cost_s for each in predicted))

    def gather(
        self,
        name: str,
        layout: Layout,
        step: Step,
        path: Tensor,
        lengths: Tensor,
        tokens: Tensor,
        versions: Tensor | None = None,
    ) -> RowSpace:
        """Let the ranks of `layout` know all rows that they just made; a collective of theirs.

        Args:
            name: Name of the rows.
            layout: Where they were made.
            step: The step that gets them.
            path: `[B, depth]`, paths of this rank's rows.
            lengths: `[B]`, response tokens of each.
            tokens: `[B]`, what a model reads of each.
            versions: `[B]`, version of the policy that generated each; None where none did.
        """
        run = self._run
        space = RowSpace.gather(
            name,
            self._transport,
            layout,
            path=path,
            lengths=lengths,
            tokens=tokens,
            versions=versions,
            above=run.graph.levels(name)[:-1],
        )
        step.spaces[name] = run.in_step(space, step.number)
        return step.spaces[name]

    def tell(self, task: Tell, step: Step) -> None:
        """Broadcast all rows of a space to the ranks that do not know them."""
        name = task.value
        message = space_to_message(step.spaces[name]) if self._transport.rank == task.teller else None
        message = self._transport.broadcast_bytes(message, task.teller, task.ranks)
        if self._transport.rank == task.teller:
            return
        space = self._run.in_step(space_from_message(message), step.number)
        known = step.spaces.get(name)
        if known is not None and torch.equal(known.path, space.path):  # again, after they were scored
            known.dropped.copy_(space.dropped)
        else:
            step.spaces[name] = space

    def exchange(self, task: Exchange, step: Step) -> None:
        """Start to bring a value to a layout, or beside rows above or below it."""
        graph = self._run.graph
        space = step.spaces[graph.space_of(task.value)]
        made_here = self._transport.rank in task.source.ranks
        if not made_here and not step.buffer.holds(task.value, space):
            step.buffer.put(task.value, None, graph.type_of(task.value), space, task.source)
        step.buffer.issue(task.value, task.target, step.spaces[task.reader_space], task.columns)

    def carried_over(self, done: int) -> dict[str, Groups]:
        """After `done` steps, what this rank made for training of each step that is generated and not trained."""
        steps = self._in_progress(done) if self._generates else ()
        return {step_name(step): self._carried.of(self._steps[step]) for step in steps}

    def take_over(self, done: int, read: ReadGroups, run: Callable[[Task, int], None]) -> None:
        """Take back what `carried_over` gave.

        Args:
            done: Steps that were trained.
            read: Reads it.
            run: Runs a task of this rank, for what crosses to the ranks that train.
        """
        for step in self._in_progress(done):
            self.begin(step, draw=0)
            if self._generates:
                groups = read(step_name(step), self._carried.empty())
                assert groups is not None, step
                self._carried.put(groups, self._steps[step])
            for task in self._crossing:
                if self._transport.rank in task.ranks:
                    run(task, step)

    def _in_progress(self, done: int) -> range:
        return range(done, min(done + self._run.plan.max_staleness, self._run.steps))
