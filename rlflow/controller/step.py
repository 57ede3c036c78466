"""`Step`: the rows, values and metrics of one step on one rank while it lasts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlflow.controller.run import Run
from rlflow.dag.node import BATCH, Node
from rlflow.dag.tasks import BroadcastRows, Exchange
from rlflow.databuffer.buffer import DataBuffer
from rlflow.databuffer.groups import Groups, GroupValue, space_without_rows
from rlflow.databuffer.rows import RowSpace, space_from_message, space_to_message
from rlflow.metrics import StepMetrics
from rlflow.values.layout import Layout


class Step:
    """A step in progress on one rank.

    In the middle of the second step of a GRPO run, after its rewards:

        number     1
        draw       1, or more where a filter has asked for more prompts
        spaces     {"batch": 32 prompts, "rollout": 256 samples below them}
        buffer     "batch", "rollout" and "rewards", where this rank made or reads them
        metrics    "rollout/length", "reward/mean", "time/rollout", ... of this rank

    Args:
        run: The run on this rank.
        number: Number of the step, from 0.
        draw: Number of the last draw that brought prompts for the step, from 0.
        metrics: Metrics that this rank logs for the step.

    Attributes:
        buffer: Values of the step.
        spaces: Row spaces of the step by name, as far as this rank makes or reads their rows.
        cut_off: `[B]` bool, for the responses that this rank has just sampled, whether they are unfinished, see
            `trainer.partial_rollout`; None if none is cut off.
    """

    def __init__(self, run: Run, number: int, draw: int, metrics: StepMetrics) -> None:
        self.number = number
        self.draw = draw
        self.metrics = metrics
        self.buffer = DataBuffer(run.transport)
        self.spaces: dict[str, RowSpace] = {}
        self.cut_off: Tensor | None = None
        self._run = run

    def gather(
        self,
        name: str,
        layout: Layout,
        path: Tensor,
        lengths: Tensor,
        tokens: Tensor,
        versions: Tensor | None = None,
        begins: Tensor | None = None,
    ) -> RowSpace:
        """Make a row space of the rows that the ranks of `layout` have just made; a collective of these ranks.

        Args:
            name: Name of the rows.
            layout: Layout in which they were made.
            path: `[B, depth]`, paths of this rank's rows.
            lengths: `[B]`, response tokens of each row.
            tokens: `[B]`, tokens that a model reads of each row.
            versions: `[B]`, version of the policy that generated each row; None if they were not generated.
            begins: `[B]`, 1 where a row begins an episode; None if each row is one.
        """
        run = self._run
        space = RowSpace.gather(
            name,
            run.transport,
            layout,
            path=path,
            lengths=lengths,
            tokens=tokens,
            versions=versions,
            begins=begins,
            above=run.graph.levels(name)[:-1],
        )
        self.spaces[name] = run.in_step(space, self.number)
        return self.spaces[name]

    def broadcast_rows(self, task: BroadcastRows) -> None:
        """Broadcast a row space to the ranks that do not know it."""
        name, transport = task.value, self._run.transport
        message = space_to_message(self.spaces[name]) if transport.rank == task.source else None
        message = transport.broadcast_bytes(message, task.source, task.ranks)
        if transport.rank == task.source:
            return
        space = self._run.in_step(space_from_message(message), self.number)
        known = self.spaces.get(name)
        if known is not None and torch.equal(known.path, space.path):  # sent once more after its rows were scored
            known.dropped.copy_(space.dropped)
        else:
            self.spaces[name] = space

    def exchange(self, task: Exchange) -> None:
        """Start to send a value to a layout, in its own row space or in a space of rows above or below."""
        graph = self._run.graph
        space = self.spaces[graph.space_of(task.value)]
        made_here = self._run.rank in task.source.ranks
        if not made_here and not self.buffer.holds(task.value, space):
            self.buffer.put(task.value, None, graph.type_of(task.value), space, task.source)
        self.buffer.issue(task.value, task.target, self.spaces[task.reader_space], task.columns)

    def left_out(self, space: RowSpace, node: Node) -> Tensor | None:
        """`[N]` bool, the rows that a node must not see because a reward that it depends on dropped them.

        It is None if the node depends on no scores, or nothing was dropped. Rows of another branch of the tree are not
        left out if they were made from the scores, since the node that made them saw no dropped rows.
        """
        if not node.follows:
            return None
        out = space.dropped.clone()
        made_of = () if space.name == BATCH else self._run.graph.nodes[space.name].follows
        for name in node.follows:
            scored = self.spaces.get(name)  # a replay has only rows that the node sees, with dropped ones marked
            if scored is None or scored is space or not scored.dropped.any():
                continue
            of_another_branch = space.levels_shared_with(scored) < min(len(space.levels), len(scored.levels))
            if not (of_another_branch and name in made_of):
                out |= space.dropped_with(scored)
        return out if out.any() else None

    def groups(self, like: Groups) -> Groups:
        """All groups of this step whose rows this rank knows, with rows and values of the names in `like`."""
        spaces = {name: self.spaces[name] for name in like.spaces if name in self.spaces}
        values = {
            name: replace(value, rows=self.buffer.get(name, value.layout) if like.rank in value.layout.ranks else None)
            for name, value in like.values.items()
            if value.space in self.spaces
        }
        return Groups(like.rank, spaces, values)

    def put(self, groups: Groups) -> None:
        """Replace the step's rows and values by these groups, as if the step had made them itself."""
        for name, space in groups.spaces.items():
            self.spaces[name] = self._run.in_step(space, self.number)
        for name, value in groups.values.items():
            self.buffer.put(name, value.rows, value.annotation, self.spaces[value.space], value.layout)

    def log_exchanges(self, held_bytes: int) -> None:
        """Log the step's exchanges, and `held_bytes`, the bytes of values of all steps in progress."""
        buffer, metrics = self.buffer, self.metrics
        metrics.sum("exchange/bytes", buffer.bytes_sent)
        metrics.largest("exchange/busiest_rank_bytes", max(buffer.bytes_sent, buffer.bytes_received))
        metrics.largest("exchange/held_bytes_max", held_bytes)
        metrics.seconds("time/exchange_wait", buffer.waited_s)
        if predicted := [space.predicted for space in self.spaces.values()]:
            metrics.largest("balance/predicted_gain_s", sum(each.gain_s for each in predicted))
            metrics.largest("balance/predicted_cost_s", sum(each.cost_s for each in predicted))


def no_groups(run: Run, spaces: Sequence[str], values: Sequence[str]) -> Groups:
    """Groups with these spaces and values, without rows: they name what is carried over from step to step."""
    layouts, graph = run.value_layouts, run.graph
    return Groups(
        run.rank,
        {name: space_without_rows(graph.levels(name), layouts[name]) for name in spaces},
        {name: GroupValue(graph.type_of(name), graph.space_of(name), layouts[name], None) for name in values},
    )
