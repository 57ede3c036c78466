"""One rank's execution of its plan. No rank commands another: all run the same global order, each its own tasks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlflow.callbacks.callback import Callback
from rlflow.checkpoint.kept_rows import SURPLUS, UNDER_WAY, flight_name
from rlflow.controller.context import NodeContext, Running
from rlflow.controller.crossing import Crossing
from rlflow.controller.filling import Filling
from rlflow.controller.finite import require_finite
from rlflow.controller.gap import LogprobGap
from rlflow.controller.in_step import InStep
from rlflow.controller.keeping import Keeping
from rlflow.controller.partial import PartialRollout
from rlflow.controller.probe import Probe
from rlflow.controller.syncing import WeightSync
from rlflow.controller.training import Training
from rlflow.dag.graph import Graph
from rlflow.dag.node import BATCH, Node
from rlflow.dag.planner import Plan
from rlflow.dag.tasks import Exchange, Fill, HoldBack, Load, Reduce, RunNode, Save, SyncWeights, Task, Tell, TrainNode
from rlflow.data.prefetch import Prefetch
from rlflow.databuffer.balance import Balance
from rlflow.databuffer.buffer import DataBuffer
from rlflow.databuffer.kept import Kept
from rlflow.databuffer.message import to_message
from rlflow.databuffer.rows import RowSpace
from rlflow.databuffer.telling import heard, told
from rlflow.databuffer.transport import Transport
from rlflow.errors import UserError
from rlflow.loggers.trace import Trace
from rlflow.memory.out_of_memory import memory_watched, to_generate, to_hold_rows, to_score, to_train
from rlflow.metrics import Metrics
from rlflow.models.handle import ModelHandle
from rlflow.module import RLModule
from rlflow.process.status import report
from rlflow.rollout.engine import NO_VERSION, RolloutEngine
from rlflow.strategies.strategy import TrainingStrategy
from rlflow.values.batch import Batch
from rlflow.values.columns import to_device
from rlflow.values.host_copy import bring_over, on_host
from rlflow.values.layout import Layout
from rlflow.values.rollout import Rollout


class Controller:
    """Runs the tasks of one rank's plan, step after step, without a barrier between them.

    Where the plan overlaps steps, a slot of time has tasks of several: generation works on step s while training is at
    step s - `max_staleness`.

    Args:
        module: The algorithm; its handles are attached to `strategy` already.
        graph: Of the module.
        plan: Of all ranks; this rank's part is taken from it.
        steps: Of the run.
        follows: The role whose weights the rollout engine generates with, if any.
        strategy: Trains.
        engine: Generates on this rank; None where no engine is placed here.
        sync: Brings weights to the engines; None on ranks that have no part in it.
        probe: Compares engine and trainer after each sync, where no step does so by itself; None where steps do.
        loader: Of the training rows.
        transport: To the other ranks.
        metrics: Of this rank, reduced once a step.
        gap: The alarm for wrong rollout weights.
        trace: Of this rank's tasks.
        callbacks: Told of nodes and syncs.
        context: Of this rank; the module is attached to it.
        seed: Of the run.
        balance: Whether rows may move to even out tokens.
        max_tokens_per_draw: By which a response grows at most before it is cut off; None where none is.
        save: Writes the models to the run's folder if this step is one to save at.
    """

    def __init__(
        self,
        *,
        module: RLModule,
        graph: Graph,
        plan: Plan,
        steps: int,
        follows: str | None,
        strategy: TrainingStrategy,
        engine: RolloutEngine | None,
        sync: WeightSync | None,
        probe: Probe | None,
        loader: Prefetch,
        transport: Transport,
        metrics: Metrics,
        gap: LogprobGap,
        trace: Trace,
        callbacks: Sequence[Callback],
        context: NodeContext,
        seed: int,
        balance: Balance,
        max_tokens_per_draw: int | None,
        save: Callable[[int], None],
    ) -> None:
        self.plan = plan.for_rank(transport.rank)
        self._sleeps_after = _last_that_samples(self.plan, graph)
        self._fills = plan.fill is not None
        repeated = () if plan.fill is None else plan.fill.tasks
        self._repeated = {task.node_id for task in repeated if isinstance(task, RunNode)}
        self.draws = 0  # how often prompts were drawn, the draw under way included
        self._steps = steps
        self._staleness = plan.max_staleness
        self._slot = 0  # the step whose rows are generated next
        keep = partial(Keeping, graph, plan, transport.rank, seed=seed, balance=balance)
        self._crossing = Crossing(graph, plan, transport.rank, keep)
        self._flights: dict[int, InStep] = {}
        self._module = module
        self._graph = graph
        self._layouts = plan.layouts()
        self._follows = follows
        self._strategy = strategy
        self._engine = engine
        self._sync = sync
        self._shares_memory = _engines_share_ranks(plan, graph)
        self._probe = probe
        self._loader = loader
        self._transport = transport
        self._metrics = metrics
        self._gap = gap
        self._trace = trace
        self._callbacks = callbacks
        self._balance = balance
        self._seed = seed
        self._began = time.perf_counter()
        self._save = save
        self.filling = Filling(graph, plan, transport, metrics, loader.prompts_per_step, module.max_draws, keep)
        self.partial: PartialRollout | None = None
        for task in plan.every():
            if isinstance(task, HoldBack) and max_tokens_per_draw is not None:
                self.partial = PartialRollout(plan, task, transport, max_tokens_per_draw, keep)
        self._training = Training(module, graph, strategy, transport, metrics, seed, self._compared)
        self._reduced: dict[str, float] = {}
        self._slot_began = self._waited_before = 0.0
        self.context = context

    def step(self, step: int) -> dict[str, float]:
        """Run the plan until `step` is trained, up to its saves; the step's metrics, the same on every rank."""
        while self._slot <= step + self._staleness:
            self._run_slot(self._slot)
            self._slot += 1
        return self._reduced

    def run(self, task: Task, step: int) -> None:
        """One task of this rank's plan."""
        self._metrics.step = step
        for callback in self._callbacks:
            callback.on_task_start(str(task), step)
        doing = f"step {step + 1}, {self._doing(task)}"
        with self._watched(task, step), memory_watched(doing, lambda: self._remedies(task), self._strategy):
            match task:
                case Load():
                    self._load(task, step)
                case SyncWeights():
                    self.sync_weights(self.version_of(step))
                case Tell():
                    self._tell(task, step)
                case Exchange():
                    self._exchange(task, step)
                case RunNode():
                    self._run_node(task, step)
                case TrainNode():
                    self._train(task, step)
                case HoldBack():
                    self._hold_back(task, step)
                case Fill():
                    self._fill(task, step)
                case Reduce():
                    self._reduce(step)
                case Save():
                    self._save(step)
            if task == self._sleeps_after and self._engine is not None and self._shares_memory:
                self._engine.sleep()

    def save(self, done: int) -> None:
        """Run the plan's saves, once callbacks and validation have seen the `done` steps and keep what they saw."""
        for task in self.plan:
            if isinstance(task, Save):
                self.run(task, done)

    def close(self) -> None:
        """Let go of steps that are under way: the run ends before they are trained."""
        for now in self._flights.values():
            now.buffer.clear()

    def version_after(self, steps: int) -> int:
        """The version of the followed role's weights after so many steps: how often a train node changed them."""
        if self._follows is None:
            return 0
        handle: ModelHandle = getattr(self._module, self._follows)
        nodes = sum(node.kind == "train" and node.role == self._follows for node in self._graph.order)
        return nodes * max(0, steps - handle.start_step)

    def version_of(self, step: int) -> int:
        """The version that generates the rows of `step`: the weights after the last step trained by then."""
        return self.version_after(max(0, step - self._staleness))

    def sync_weights(self, version: int) -> None:
        """Bring the engines to `version`, which the trainer has, unless they are; each verifies tensor by tensor."""
        if self._sync is None:
            return
        if self._probe is None:
            self._gap.open(version)
        if self._sync.version == version:
            return
        report = self._sync.run(version)
        if self._probe is not None:
            self._probe.run(version)
        if report is not None:
            self._metrics.number("sync/verified_tensors", float(report.tensors))
            for callback in self._callbacks:
                callback.on_weight_sync(version)

    def sleep(self) -> None:
        """Let the engines go to sleep after validation, where no step would do so; all ranks call it."""
        if self._engine is not None:
            self._engine.sleep()
        if self._sync is not None:
            self._sync.forget()

    def sync_for_validation(self, done: int) -> None:
        """Bring the engines to the weights after `done` steps; the next step is told of it, which may need no sync."""
        self._metrics.step = done
        self.sync_weights(self.version_after(done))

    def kept(self, done: int) -> dict[str, Kept]:
        """After `done` steps, what this rank has for later ones, by name.

        Groups beyond a step's, those that are under way, and of each step that is generated and not trained what this
        rank made for training.
        """
        steps = self._steps_in_flight(done) if self._crossing.made_here else ()
        kept: dict[str, Kept | None] = {
            flight_name(step): self._crossing.keeping.of(self._flights[step]) for step in steps
        }
        kept |= {SURPLUS: self.filling.surplus, UNDER_WAY: None if self.partial is None else self.partial.held}
        return {name: rows for name, rows in kept.items() if rows is not None}

    def restore(self, done: int, draws: int, read: Callable[[str, Kept], Kept | None]) -> None:
        """Go on after `done` steps; all ranks call it.

        Args:
            done: Steps that were trained.
            draws: How often prompts were drawn.
            read: What `kept` gave by that name, told what it is made of, without rows; None where it gave nothing.

        Raises:
            UserError: It was kept of another algorithm.
        """
        self._slot, self.draws = done + self._staleness, draws
        self.filling.restore(read)
        if self.partial is not None:
            self.partial.restore(read)
        for step in self._steps_in_flight(done):
            now = self._flights[step] = InStep(step, DataBuffer(self._transport))
            if self._crossing.made_here:
                flight = read(flight_name(step), self._crossing.keeping.empty())
                assert flight is not None, step
                self._crossing.keeping.put(flight, now)
            for task in self._crossing.tasks:
                if self._transport.rank in task.ranks:
                    self.run(task, step)

    def _run_slot(self, slot: int) -> None:
        """All tasks of this rank but the saves: of step `slot`, and of those that lag behind it."""
        if slot < self._steps:
            self._flights[slot] = InStep(slot, DataBuffer(self._transport), draw=self.draws)
            self.draws += not self._fills
        started = self._slot_began = time.perf_counter()
        self._waited_before = self._trace.waited_s
        for task in self.plan:
            step = slot - task.lag
            if isinstance(task, Save) or not 0 <= step < self._steps:
                continue
            if isinstance(task, Reduce):
                self._metrics.step = step
                self._metrics.seconds("time/step", time.perf_counter() - started)
                self._metrics.seconds("time/elapsed", time.perf_counter() - self._began)
            self.run(task, step)
            if isinstance(task, Reduce):
                self._flights.pop(step).buffer.clear()
        if self._sync is not None and self._shares_memory:
            self._sync.forget()

    def _load(self, task: Load, step: int) -> None:
        now, layout = self._flights[step], task.layout
        self._begin(now.draw, layout)
        batch, ids = self._loader.batch(now.draw, layout.shard(self._transport.rank), layout.shards)
        lengths = batch.lengths if isinstance(batch, Batch) else torch.zeros_like(ids)  # of pairs nothing is per token
        space = self._gather_space(BATCH, layout, now, ids=ids, groups=ids, lengths=lengths, tokens=batch.tokens)
        on_device = to_device(batch, self._strategy.root_device)
        now.buffer.put(BATCH, on_device, self._graph.type_of(BATCH), space, layout)
        if self.partial is not None:
            self.partial.join(now)

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

    def _tell(self, task: Tell, step: int) -> None:
        """Of the rows of a space, all; of a rollout node that keeps the prompts' rows, how long its responses are."""
        now, name = self._flights[step], task.value
        of_space = self._graph.space_of(name) == name
        message = None
        if self._transport.rank == task.teller:
            message = told(now.spaces[name]) if of_space else now.lengths[name].view(torch.uint8)
        message = self._transport.broadcast_bytes(message, task.teller, task.ranks)
        if self._transport.rank == task.teller:
            return
        if of_space:
            now.spaces[name] = heard(message, name, seed=self._seed, step=step, balance=self._balance)
        else:
            now.lengths[name] = message.cpu().clone().view(torch.int64)

    def _exchange(self, task: Exchange, step: int) -> None:
        now = self._flights[step]
        space = now.spaces[self._graph.space_of(task.value)]
        made_here = self._transport.rank in task.source.ranks
        if not made_here and not now.buffer.holds(task.value, space):
            annotation, lengths = self._graph.type_of(task.value), now.lengths.get(task.value)
            now.buffer.put(task.value, None, annotation, space, task.source, lengths)
        now.buffer.issue(task.value, task.target, now.spaces[task.reader_space], task.columns)

    def _fill(self, task: Fill, step: int) -> None:
        now = self._flights[step]
        self.filling.run(task, now, lambda: self._draw(task, now))
        for repeated in task.tasks:
            if isinstance(repeated, RunNode) and self._graph.nodes[repeated.node_id].samples:
                self._note_age(repeated, now)
        if self.partial is not None:
            held = self.partial.held
            self._metrics.number("rollout/under_way", 0.0 if held is None else float(len(held.groups)))

    def _draw(self, task: Fill, now: InStep) -> bool:
        """The tasks of a `Fill` on the next prompts; whether any group went through all of them."""
        now.draw = self.draws
        self.draws += 1
        for repeated in task.tasks:
            self.run(repeated, now.step)
            if isinstance(repeated, HoldBack) and self.partial is not None and self.partial.all_held:
                return False
        return True

    def _hold_back(self, task: HoldBack, step: int) -> None:
        now, layout = self._flights[step], self._layouts[task.node_id]
        assert self.partial is not None
        self.partial.hold_back(now, self.context.under_way)
        if layout.publishes(self._transport.rank):
            self._measure(now.buffer.get(task.node_id, layout))
        self._free(task.frees, now)

    def _run_node(self, task: RunNode, step: int) -> None:
        now, node = self._flights[step], self._graph.nodes[task.node_id]
        for callback in self._callbacks:
            callback.on_node_start(node.id)
        values, read = self._read(node, task.layout, now)
        result = self._call(node, read, task.layout, values, now)
        space = read
        if node.samples:
            space = self._sampled(node, task.layout, now, result)
            if node.id not in self._repeated:
                self._note_age(task, now)
        elif node.samples_in_place:
            here, ranks = on_host(result.lengths), task.layout.ranks
            now.lengths[node.id] = read.gathered(task.layout, here, self._transport, ranks)
        elif node.role is not None:
            self._compared(node.role)
        now.buffer.put(node.id, result, node.returns, space, task.layout, now.lengths.get(node.id))
        if node.role is None:
            require_finite(node, result, read, task.layout, self._transport)
        self._free(task.frees, now)
        for callback in self._callbacks:
            callback.on_node_end(node.id)

    def _train(self, task: TrainNode, step: int) -> None:
        now, node = self._flights[step], self._graph.nodes[task.node_id]
        values, space = self._read(node, task.layout, now)
        if self._training.begun(node, step):
            self.context.running = Running(node, space, task.layout, now.draw, NO_VERSION)
            self._training.run(node, values, space, task.layout, step)
            self.context.running = None
        self._free(task.frees, now)

    def _reduce(self, step: int) -> None:
        self._transport.clock.settle()
        now = self._flights[step]
        buffer, held = now.buffer, [flight.buffer for flight in self._flights.values()]
        self._metrics.sum("exchange/bytes", buffer.bytes_sent)
        self._metrics.largest("exchange/busiest_rank_bytes", max(buffer.bytes_sent, buffer.bytes_received))
        self._metrics.largest("exchange/held_bytes_max", sum(each.peak_held_bytes for each in held))
        self._metrics.seconds("time/exchange_wait", buffer.waited_s)
        if predicted := [space.predicted for space in now.spaces.values()]:
            self._metrics.largest("balance/predicted_gain_s", sum(each.gain_s for each in predicted))
            self._metrics.largest("balance/predicted_cost_s", sum(each.cost_s for each in predicted))
        draws_total = f"{self.filling.part}/draws_total"
        if self._fills:
            self._metrics.largest(draws_total, float(self.draws))
        worked = time.perf_counter() - self._slot_began - (self._trace.waited_s - self._waited_before)
        self.context.learn(self._module.memories(), [node.id for node in self._graph.order], step)
        self._reduced = self._metrics.reduce(self._transport, worked)
        self._transport.clock.settle()  # of this very collective, which belongs to no later step
        self.draws = int(self._reduced.get(draws_total, self.draws))  # ranks without a part in it learn it
        self._gap.check(self._reduced)

    def _compared(self, role: str) -> None:
        """The followed role has seen the step's rows once, or its weights are about to change."""
        if role == self._follows:
            self._gap.close()

    def _call(self, node: Node, space: RowSpace, layout: Layout, values: dict[str, Any], now: InStep) -> Any:
        part = None if self.partial is None else self.partial.part_of(node.id)
        self.context.under_way = None
        self.context.running = Running(node, space, layout, now.draw, self.version_of(now.step), part)
        result = getattr(self._module, node.id)(**values)
        self.context.running = None
        return result

    def _read(self, node: Node, layout: Layout, now: InStep) -> tuple[dict[str, Any], RowSpace]:
        """The values that `node` reads, in its layout, and the row space that it runs in."""
        space = now.spaces[node.input_space]
        return self._graph.seen(node, {name: now.buffer.get(name, layout, space) for name in node.reads}), space

    def _sampled(self, node: Node, layout: Layout, now: InStep, result: Rollout) -> RowSpace:
        """The row space of the samples that a rollout node made, and the metrics of its responses."""
        if not isinstance(result, Rollout):
            raise UserError(f"rollout node `{node.id}` returned {type(result).__name__}; return what `generate` gives")
        prompts = now.spaces[BATCH]
        n = len(result.lengths) // max(len(prompts.held(layout, self._transport.rank)), 1)
        of_rows = [result.group, result.lengths, result.prompt_ids.lengths, result.version]
        bring_over(of_rows)
        groups, lengths, prompt_lengths, versions = map(on_host, of_rows)
        space = self._gather_space(
            node.id,
            layout,
            now,
            ids=groups * n + _index_in_group(groups),
            groups=groups,
            lengths=lengths,
            tokens=lengths + prompt_lengths,
            versions=versions,
        )
        if self.partial is None and layout.publishes(self._transport.rank):
            self._measure(result)
        return space

    def _measure(self, rollout: Rollout) -> None:
        """The metrics of responses that have ended, of this rank's shard."""
        rows, tokens = float(len(rollout.lengths)), on_host(rollout.lengths).sum()
        self._metrics.mean("rollout/length", tokens, rows)
        self._metrics.mean("rollout/truncated", (~rollout.finished).sum(), rows)
        self._metrics.sum("rollout/tokens", float(tokens))
        if self.partial is not None:
            places = torch.arange(rollout.versions.shape[1], device=rollout.versions.device)
            newer = (rollout.versions > rollout.version[:, None]) & (places < rollout.lengths[:, None])
            self._metrics.mean("rollout/continued", newer.any(dim=1).sum(), rows)

    def _note_age(self, run: RunNode, now: InStep) -> None:
        """How many versions older than the trainer's the weights were that began the responses of the step."""
        if (self._staleness or self._fills) and self._transport.rank == run.layout.ranks[0]:
            versions = now.spaces[run.node_id].versions
            ages = self.version_after(now.step) - versions
            self._metrics.mean("rollout/staleness", ages.sum(), float(len(versions)))

    def _gather_space(self, name: str, layout: Layout, now: InStep, **rows: Tensor) -> RowSpace:
        now.spaces[name] = RowSpace.gather(
            name, self._transport, layout, seed=self._seed, step=now.step, balance=self._balance, **rows
        )
        return now.spaces[name]

    def _free(self, names: Sequence[str], now: InStep) -> None:
        for name in names:
            now.buffer.free(name)

    def _steps_in_flight(self, done: int) -> range:
        return range(done, min(done + self._staleness, self._steps))

    def _doing(self, task: Task) -> str:
        """The task in an error: its node and role, or what it brings where."""
        if not isinstance(task, RunNode | TrainNode):
            return " ".join(str(task).split())
        role = self._graph.nodes[task.node_id].role
        return f"node `{task.node_id}`{f' of role `{role}`' if role else ''}"

    def _remedies(self, task: Task) -> list[str]:
        """What lowers the memory that a task takes."""
        if isinstance(task, SyncWeights):
            return ["lower `trainer.sync_bucket_bytes`", *to_generate(self._strategy, self._engine)]
        if not isinstance(task, RunNode | TrainNode):
            return to_hold_rows()
        node = self._graph.nodes[task.node_id]
        if node.kind == "rollout":
            return to_generate(self._strategy, self._engine)
        if node.role is None:
            return to_hold_rows()
        if isinstance(task, TrainNode):
            return to_train(self._strategy, getattr(self._module, node.role))
        return to_score(self._strategy)

    @contextmanager
    def _watched(self, task: Task, step: int) -> Iterator[None]:
        """Time a task, and say of an error where this rank stood."""
        started = time.perf_counter()
        report(self._transport.rank, f"step {step + 1}, {task}")
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            error.add_note(f"rank {self._transport.rank}, step {step}: {task}")
            raise
        ended = time.perf_counter()
        report(self._transport.rank, f"step {step + 1}")
        self._trace.span(str(task), type(task).__name__, started, ended, step=step)
        if isinstance(task, RunNode | TrainNode):
            self._metrics.seconds(f"time/{task.node_id}", ended - started)
        elif isinstance(task, SyncWeights):
            self._metrics.seconds("time/sync", ended - started)
        elif isinstance(task, Load):
            self._metrics.seconds("time/load", ended - started)


def _engines_share_ranks(plan: Plan, graph: Graph) -> bool:
    """Whether some rank both generates and trains, so that engines make room after they have generated."""
    runs = [task for task in plan.every() if isinstance(task, RunNode | TrainNode)]
    generating = {rank for run in runs if graph.nodes[run.node_id].kind == "rollout" for rank in run.ranks}
    return any(generating.intersection(run.ranks) for run in runs if isinstance(run, TrainNode))


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
