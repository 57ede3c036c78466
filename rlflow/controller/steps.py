"""The steps in progress on one rank: their rows and values, and how other ranks hear of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlflow.checkpoint.kept_rows import flight_name
from rlflow.controller.run import Run
from rlflow.controller.step_state import InStep, Keep
from rlflow.dag.graph import Graph
from rlflow.dag.node import BATCH
from rlflow.dag.planner import Plan
from rlflow.dag.tasks import Exchange, Load, RunNode, Task, Tell, TrainNode
from rlflow.databuffer.buffer import DataBuffer
from rlflow.databuffer.kept import Kept
from rlflow.databuffer.rows import RowSpace, space_from_message, space_to_message
from rlflow.metrics import Metrics
from rlflow.values.layout import Layout


class Steps:
    """Several where the plan overlaps them, one otherwise.

    Args:
        run: The run on this rank.
        metrics: Metrics of this rank.
    """

    def __init__(self, run: Run, metrics: Metrics) -> None:
        self._run = run
        self._transport = run.transport
        self._metrics = metrics
        self._crossing = Crossing(run.graph, run.plan, run.rank, run.keeping)
        self._steps: dict[int, InStep] = {}

    def __getitem__(self, step: int) -> InStep:
        return self._steps[step]

    def begin(self, step: int, draw: int) -> None:
        """Make room for a step's rows, the first of which are those of `draw`."""
        self._steps[step] = InStep(step, DataBuffer(self._transport), self._metrics.of(step), draw=draw)

    def end(self, step: int) -> None:
        """Let go of a step that was trained."""
        self._steps.pop(step).buffer.clear()

    def clear(self) -> None:
        """Let go of all: the run ends before they are trained."""
        for now in self._steps.values():
            now.buffer.clear()

    def log_exchanges(self, step: int) -> None:
        """What a step's values took to travel, and to hold with those of the other steps."""
        now = self._steps[step]
        buffer, metrics = now.buffer, now.metrics
        metrics.sum("exchange/bytes", buffer.bytes_sent)
        metrics.largest("exchange/busiest_rank_bytes", max(buffer.bytes_sent, buffer.bytes_received))
        held = sum(each.buffer.peak_held_bytes for each in self._steps.values())
        metrics.largest("exchange/held_bytes_max", held)
        metrics.seconds("time/exchange_wait", buffer.waited_s)
        if predicted := [space.predicted for space in now.spaces.values()]:
            metrics.largest("balance/predicted_gain_s", sum(each.gain_s for each in predicted))
            metrics.largest("balance/predicted_cost_s", sum(each.cost_s for each in predicted))

    def gather(self, name: str, layout: Layout, now: InStep, path: Tensor, **numbers: Tensor) -> RowSpace:
        """Let the ranks of `layout` know all rows that they just made; a collective of theirs.

        Args:
            name: Of the rows.
            layout: Where they lie.
            now: Their step, which gets them.
            path: `[B, depth]`, of this rank's.
            numbers: `[B]` each, see `RowSpace`.
        """
        run = self._run
        space = RowSpace.gather(
            name,
            self._transport,
            layout,
            path=path,
            lengths=numbers["lengths"],
            tokens=numbers["tokens"],
            versions=numbers.get("versions"),
            above=run.graph.levels(name)[:-1],
        )
        now.spaces[name] = space.at(seed=run.settings.seed, step=now.step, balance=run.settings.balancing)
        return now.spaces[name]

    def tell(self, task: Tell, step: int) -> None:
        """Of the rows of a space, all."""
        now, name, run = self._steps[step], task.value, self._run
        message = space_to_message(now.spaces[name]) if self._transport.rank == task.teller else None
        message = self._transport.broadcast_bytes(message, task.teller, task.ranks)
        if self._transport.rank == task.teller:
            return
        space = space_from_message(message)
        space = space.at(seed=run.settings.seed, step=step, balance=run.settings.balancing)
        known = now.spaces.get(name)
        if known is not None and torch.equal(known.path, space.path):  # again, after they were scored
            known.dropped.copy_(space.dropped)
        else:
            now.spaces[name] = space

    def exchange(self, task: Exchange, step: int) -> None:
        """Start to bring a value to a layout, or beside rows above or below it."""
        now, graph = self._steps[step], self._run.graph
        space = now.spaces[graph.space_of(task.value)]
        made_here = self._transport.rank in task.source.ranks
        if not made_here and not now.buffer.holds(task.value, space):
            now.buffer.put(task.value, None, graph.type_of(task.value), space, task.source)
        now.buffer.issue(task.value, task.target, now.spaces[task.reader_space], task.columns)

    def free(self, names: Sequence[str], now: InStep) -> None:
        """Forget values of a step that nobody reads any more."""
        for name in names:
            now.buffer.free(name)

    def kept(self, done: int) -> dict[str, Kept]:
        """After `done` steps, of each that is generated and not trained what this rank made for training, by name."""
        steps = self._in_progress(done) if self._crossing.made_here else ()
        return {flight_name(step): self._crossing.keeping.of(self._steps[step]) for step in steps}

    def restore(self, done: int, read: Callable[[str, Kept], Kept | None], run: Callable[[Task, int], None]) -> None:
        """Take back what `kept` gave.

        Args:
            done: Steps that were trained.
            read: Finds it by name, told what it is made of.
            run: Runs a task of this rank, for what crosses to the ranks that train.
        """
        for step in self._in_progress(done):
            self.begin(step, draw=0)
            if self._crossing.made_here:
                flight = read(flight_name(step), self._crossing.keeping.empty())
                assert flight is not None, step
                self._crossing.keeping.put(flight, self._steps[step])
            for task in self._crossing.tasks:
                if self._transport.rank in task.ranks:
                    run(task, step)

    def _in_progress(self, done: int) -> range:
        return range(done, min(done + self._run.plan.max_staleness, self._run.steps))


class Crossing:
    """The values that cross, and the rows that they are of.

    Args:
        graph: Of the module.
        plan: Of all ranks.
        rank: This one.
        keep: Keeps rows and values of this rank.

    Attributes:
        tasks: What brings them over, of all ranks, in the global order.
        made_here: Whether this rank runs ahead.
        keeping: What is kept of them.
    """

    def __init__(self, graph: Graph, plan: Plan, rank: int, keep: Keep) -> None:
        self.tasks = plan.crossing()
        behind = {task.node_id for task in plan.every() if isinstance(task, RunNode | TrainNode) and task.lag}
        ahead = [task for task in plan.every() if isinstance(task, Load | RunNode) and not task.lag]
        self.made_here = bool(self.tasks) and any(rank in task.ranks for task in ahead)
        runs = [task.node_id for task in ahead if isinstance(task, RunNode)]
        read = {name for node in behind for name in graph.nodes[node].reads}
        spaces = [BATCH, *(name for name in runs if graph.nodes[name].makes_rows)]
        values = [name for name in (BATCH, *runs) if name in read]
        self.keeping = keep(spaces, values)
