"""One rank's execution of its plan. No rank commands another: all run the same global order, each its own tasks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rlflow.callbacks.callback import Callback
from rlflow.controller.context import NodeContext, Running
from rlflow.controller.filling import Filling
from rlflow.controller.gap import LogprobGap
from rlflow.controller.training import Training
from rlflow.dag.graph import Graph
from rlflow.dag.node import BATCH, Node
from rlflow.dag.planner import Exchange, Fill, Load, Plan, Reduce, RunNode, Save, SyncWeights, Task, TrainNode
from rlflow.data.balance import Balance
from rlflow.data.batch import Batch, Rollout, to_device
from rlflow.data.buffer import DataBuffer
from rlflow.data.layout import Layout
from rlflow.data.loader import Loader
from rlflow.data.rows import RowSpace
from rlflow.data.transport import Transport
from rlflow.errors import UserError
from rlflow.loggers.trace import Trace
from rlflow.metrics import Metrics
from rlflow.module import RLModule
from rlflow.rollout.engine import RolloutEngine
from rlflow.strategies.strategy import TrainingStrategy


class Controller:
    """Runs the tasks of one rank's plan, step after step, without a barrier between them.

    Args:
        module: The algorithm; its handles are attached to `strategy` already.
        graph: Of the module.
        plan: Of all ranks; this rank's part is taken from it.
        follows: The role whose weights the rollout engine generates with, if any.
        strategy: Trains.
        engine: Generates on this rank; None where the graph neither rolls out nor validates.
        loader: Of the training rows.
        transport: To the other ranks.
        metrics: Of this rank, reduced once a step.
        gap: The alarm for wrong rollout weights.
        trace: Of this rank's tasks.
        callbacks: Told of nodes and syncs.
        context: Of this rank; the module is attached to it.
        seed: Of the run.
        balance: Whether rows may move to even out tokens.
        bucket_bytes: Weights gathered at once by a sync.
        save: Writes the models to the run's folder if this step is one to save at.
    """

    def __init__(
        self,
        *,
        module: RLModule,
        graph: Graph,
        plan: Plan,
        follows: str | None,
        strategy: TrainingStrategy,
        engine: RolloutEngine | None,
        loader: Loader,
        transport: Transport,
        metrics: Metrics,
        gap: LogprobGap,
        trace: Trace,
        callbacks: Sequence[Callback],
        context: NodeContext,
        seed: int,
        balance: Balance,
        bucket_bytes: int,
        save: Callable[[int], None],
    ) -> None:
        self.plan = plan.for_rank(transport.rank)
        self._sleeps_after = _last_that_samples(self.plan, graph)
        self._fills = graph.filter is not None
        self.version = 0  # of the followed role's weights: how many steps trained them
        self.draws = 0  # how often prompts were drawn, the draw under way included
        self._module = module
        self._graph = graph
        self._follows = follows
        self._strategy = strategy
        self._engine = engine
        self._loader = loader
        self._transport = transport
        self._metrics = metrics
        self._gap = gap
        self._trace = trace
        self._callbacks = callbacks
        self._balance = balance
        self._seed = seed
        self._began = time.perf_counter()
        self._bucket_bytes = bucket_bytes
        self._save = save
        self._buffer = DataBuffer(transport)
        self._spaces: dict[str, RowSpace] = {}
        self.filling = Filling(
            graph, plan, self._buffer, self._spaces, transport, metrics, loader.prompts_per_step, module.max_draws
        )
        self._training = Training(module, graph, strategy, transport, metrics, seed, self._compared)
        self._reduced: dict[str, float] = {}
        self._context = context

    def step(self, step: int) -> dict[str, float]:
        """Run the plan up to its saves; the step's metrics, the same on every rank."""
        self._buffer.reset_counters()
        if not self._fills:
            self.draws += 1
        started = time.perf_counter()
        for task in self.plan:
            if isinstance(task, Save):
                continue
            if isinstance(task, Reduce):
                self._metrics.seconds("time/step", time.perf_counter() - started)
                self._metrics.seconds("time/elapsed", time.perf_counter() - self._began)
            self.run(task, step)
        return self._reduced

    def run(self, task: Task, step: int) -> None:
        """One task of this rank's plan."""
        with self._watched(task, step):
            match task:
                case Load():
                    self._load(task, step)
                case SyncWeights():
                    self.sync_weights()
                case Exchange():
                    self._buffer.issue(task.value, task.target, self._spaces[task.reader_space])
                case RunNode():
                    self._run_node(task, step)
                case TrainNode():
                    self._train(task, step)
                case Fill():
                    self.filling.run(task, lambda: self._draw(task, step))
                case Reduce():
                    self._reduce()
                case Save():
                    self._save(step)
            if task == self._sleeps_after and self._engine is not None:
                self._engine.sleep()

    def save(self, done: int) -> None:
        """Run the plan's saves, once callbacks and validation have seen the `done` steps and keep what they saw."""
        for task in self.plan:
            if isinstance(task, Save):
                self.run(task, done)

    def sync_weights(self) -> None:
        """Bring the engine to the trainer's weights, unless it has them; verified by the engine tensor by tensor."""
        if self._engine is None or self._engine.policy_version == self.version:
            return
        assert self._follows is not None
        self._engine.wake_up()
        buckets = self._strategy.weights(self._follows, self._bucket_bytes)
        report = self._engine.update_weights(buckets, self.version)
        self._metrics.number("sync/verified_tensors", float(report.tensors))
        for callback in self._callbacks:
            callback.on_weight_sync(self.version)

    def _load(self, task: Load, step: int) -> None:
        layout = task.layout
        batch, ids = self._loader.batch(self.draws - 1, layout.shard(self._transport.rank), layout.shards)
        lengths = batch.lengths if isinstance(batch, Batch) else torch.zeros_like(ids)  # of pairs nothing is per token
        space = self._gather_space(BATCH, layout, step, ids=ids, groups=ids, lengths=lengths, tokens=batch.tokens)
        on_device = to_device(batch, self._strategy.root_device)
        self._buffer.put(BATCH, on_device, self._graph.type_of(BATCH), space, layout)

    def _draw(self, task: Fill, step: int) -> None:
        """The tasks of a `Fill` on the next prompts."""
        self.draws += 1
        for repeated in task.tasks:
            self.run(repeated, step)

    def _run_node(self, task: RunNode, step: int) -> None:
        node = self._graph.nodes[task.node_id]
        for callback in self._callbacks:
            callback.on_node_start(node.id)
        values, read = self._read(node, task.layout)
        if node.kind == "rollout":
            self._gap.open(self.version)
        result = self._call(node, read, task.layout, values)
        space, lengths = read, None
        if node.samples:
            space = self._sampled(node, task.layout, step, result)
        elif node.kind == "rollout":
            # These rows are the prompts', whose own responses, if any, have other lengths.
            lengths = read.in_order(task.layout, self._transport.all_gather_ragged(result.lengths.cpu()))
        elif node.role is not None:
            self._compared(node.role)
        self._buffer.put(node.id, result, node.returns, space, task.layout, lengths)
        self._free(task.frees)
        for callback in self._callbacks:
            callback.on_node_end(node.id)

    def _train(self, task: TrainNode, step: int) -> None:
        node = self._graph.nodes[task.node_id]
        values, space = self._read(node, task.layout)
        if self._training.begun(node, step):
            self._context.running = Running(node, space, task.layout, self.draws - 1, self.version)
            self._training.run(node, values, space, task.layout, step)
            self._context.running = None
            self.version += node.role == self._follows
        self._free(task.frees)

    def _reduce(self) -> None:
        self._metrics.sum("exchange/bytes", self._buffer.bytes_sent)
        self._metrics.largest("exchange/busiest_rank_bytes", max(self._buffer.bytes_sent, self._buffer.bytes_received))
        self._metrics.largest("exchange/held_bytes_max", self._buffer.peak_held_bytes)
        self._metrics.seconds("time/exchange_wait", self._buffer.waited_s)
        self._reduced = self._metrics.reduce(self._transport)
        self._gap.check(self._reduced)

    def _compared(self, role: str) -> None:
        """The followed role has seen the step's rows once, or its weights are about to change."""
        if role == self._follows:
            self._gap.close()

    def _call(self, node: Node, space: RowSpace, layout: Layout, values: dict[str, Any]) -> Any:
        self._context.running = Running(node, space, layout, self.draws - 1, self.version)
        result = getattr(self._module, node.id)(**values)
        self._context.running = None
        return result

    def _read(self, node: Node, layout: Layout) -> tuple[dict[str, Any], RowSpace]:
        """The values that `node` reads, in its layout, and the row space that it runs in."""
        space = self._spaces[node.input_space]
        return {name: self._buffer.get(name, layout, space) for name in node.reads}, space

    def _sampled(self, node: Node, layout: Layout, step: int, result: Rollout) -> RowSpace:
        """The row space of the samples that a rollout node made, and the metrics of its responses."""
        if not isinstance(result, Rollout):
            raise UserError(f"rollout node `{node.id}` returned {type(result).__name__}; return what `generate` gives")
        prompts = self._spaces[BATCH]
        n = len(result.lengths) // max(len(prompts.held(layout, self._transport.rank)), 1)
        ids = (result.group * n + _index_in_group(result.group)).cpu()
        lengths = result.lengths.cpu()
        space = self._gather_space(
            node.id,
            layout,
            step,
            ids=ids,
            groups=result.group.cpu(),
            lengths=lengths,
            tokens=lengths + result.prompt_ids.lengths.cpu(),
            versions=result.version.cpu(),
        )
        if layout.publishes(self._transport.rank):
            rows = float(len(lengths))
            self._metrics.mean("rollout/length", lengths.sum(), lengths.new_tensor(rows))
            self._metrics.mean("rollout/truncated", (~result.finished).sum(), lengths.new_tensor(rows))
            self._metrics.sum("rollout/tokens", float(lengths.sum()))
        return space

    def _gather_space(self, name: str, layout: Layout, step: int, **rows: Tensor) -> RowSpace:
        self._spaces[name] = RowSpace.gather(
            name, self._transport, layout, seed=self._seed, step=step, balance=self._balance, **rows
        )
        return self._spaces[name]

    def _free(self, names: Sequence[str]) -> None:
        for name in names:
            self._buffer.free(name)

    @contextmanager
    def _watched(self, task: Task, step: int) -> Iterator[None]:
        """Time a task, and say of an error where this rank stood."""
        started = time.perf_counter()
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            error.add_note(f"rank {self._transport.rank}, step {step}: {task}")
            raise
        ended = time.perf_counter()
        self._trace.span(str(task), type(task).__name__, started, ended, step=step)
        if isinstance(task, RunNode | TrainNode):
            self._metrics.seconds(f"time/{task.node_id}", ended - started)
        elif isinstance(task, SyncWeights):
            self._metrics.seconds("time/sync", ended - started)
        elif isinstance(task, Load):
            self._metrics.seconds("time/load", ended - started)


def _last_that_samples(tasks: Sequence[Task], graph: Graph) -> Task | None:
    """The last task that samples, or that repeats one that does: after it the engine may sleep."""

    def samples(task: Task) -> bool:
        if isinstance(task, Fill):
            return any(samples(repeated) for repeated in task.tasks)
        return isinstance(task, RunNode) and graph.nodes[task.node_id].kind == "rollout"

    return next((task for task in reversed(tasks) if samples(task)), None)


def _index_in_group(group: Tensor) -> Tensor:
    """The position of each row among the consecutive rows of its group, `[B]` int64."""
    _, counts = group.unique_consecutive(return_counts=True)
    starts = counts.cumsum(0) - counts
    first_row: Tensor = starts.repeat_interleave(counts)
    return torch.arange(len(group), device=group.device) - first_row
