"""One rank's execution of its plan. No rank commands another: all run the same global order, each its own tasks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rlflow.callbacks.callback import Callback
from rlflow.callbacks.hooks import Callbacks
from rlflow.controller.draws import Draws
from rlflow.controller.inputs import NodeInputs
from rlflow.controller.nodes import Nodes
from rlflow.controller.policies import Policies
from rlflow.controller.run import Run
from rlflow.controller.step import Step, Steps
from rlflow.dag.tasks import Exchange, Fill, HoldBack, Load, Reduce, RunNode, Sleep, SyncWeights, Task, Tell, TrainNode
from rlflow.data.loader import Prefetch
from rlflow.databuffer.groups import Groups, ReadGroups
from rlflow.errors import UserError
from rlflow.loggers.trace import Trace
from rlflow.memory.out_of_memory import memory_watched, to_generate, to_hold_rows, to_score, to_train
from rlflow.metrics import Metrics
from rlflow.process import preemption
from rlflow.process.status import report
from rlflow.values.layout import Layout


class Controller:
    """Runs the tasks of one rank's plan, step after step, without a barrier between them.

    Where the plan overlaps steps, a slot of time has tasks of several: generation works on step s while training is at
    step s - `max_staleness`.

    Args:
        run: The run on this rank, which has met the others.
        policies: Policies that generate.
        loader: Loader of the training rows.
        metrics: Metrics of this rank, reduced once a step.
        trace: Trace of this rank's tasks.
        callbacks: Called at tasks and nodes.
        inputs: Stores what nodes read in some steps.
    """

    def __init__(
        self,
        run: Run,
        policies: Policies,
        loader: Prefetch,
        metrics: Metrics,
        trace: Trace,
        callbacks: Callbacks,
        inputs: NodeInputs,
    ) -> None:
        self.plan = run.plan.for_rank(run.rank)
        self.policies = policies
        self._run = run
        self._metrics = metrics
        self._trace = trace
        self._callbacks = callbacks
        self._steps = Steps(run, metrics)
        self._draws = Draws(run, loader, self._steps)
        self._nodes = Nodes(run, policies, callbacks, self._steps, self._draws, inputs)
        self._slot = 0  # the step whose rows are generated next
        self._began = time.perf_counter()
        self._slot_began = self._waited_before = 0.0
        self._reduced: dict[str, float] = {}

    @property
    def draws(self) -> int:
        """How often prompts were drawn."""
        return self._draws.count

    @property
    def tried(self) -> Mapping[str, int]:
        """Updates of the last step, by the roles that this rank trained in it; those among them that were skipped."""
        return self._nodes.training.tried

    @property
    def history(self) -> dict[str, dict[str, Any]]:
        """What the next steps are compared with, JSON-able: updates of the roles that this rank trains, and gaps."""
        return {"updates": self._nodes.training.watch.history, "gaps": self.policies.gaps}

    @property
    def asked(self) -> int:
        """The signal that a rank received before the end of the last step, the same on every rank; 0 for none."""
        return self._metrics.asked

    def step(self, step: int, at_first_update: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Run the plan until `step` is trained; the step's metrics, the same on every rank.

        Args:
            step: From 0.
            at_first_update: Called before a weight of this rank changes.

        Raises:
            StepGivenUp: A rank was asked to end before; on all ranks alike, none of which has changed a weight.
        """
        self._nodes.training.begin(at_first_update)
        while self._slot <= step + self._run.plan.max_staleness:
            self._run_slot(self._slot)
            self._slot += 1
        return self._reduced

    def run(self, task: Task, step: int) -> None:
        """One task of this rank's plan."""
        self._callbacks.call(Callback.on_task_start, str(task), step)
        doing = f"step {step + 1}, {self._doing(task)}"
        with self._watching(task, step), memory_watched(doing, lambda: self._remedies(task), self._run.strategy):
            now = self._steps[step]
            match task:
                case Load():
                    self._draws.load(task, now)
                case SyncWeights():
                    self.policies.sync(task.policy, step, now.metrics, task.changed)
                case Sleep():
                    self.policies[task.policy].sleep()
                case Tell():
                    self._steps.tell(task, now)
                case Exchange():
                    self._steps.exchange(task, now)
                case RunNode():
                    self._nodes.run(task, now)
                case TrainNode():
                    self._nodes.train(task, now)
                case HoldBack():
                    self._nodes.hold_back(task, now)
                case Fill():
                    self._fill(task, now)
                case Reduce():
                    self._reduce(now)

    def close(self) -> None:
        """Let go of steps that are in progress: the run ends before they are trained."""
        self._steps.clear()

    def carried_over(self, done: int) -> dict[str, Groups]:
        """After `done` steps, what this rank has for later ones, by name.

        Groups beyond a step's, unfinished ones, and of each step that is generated and not trained what this rank made
        for training.
        """
        return self._steps.carried_over(done) | self._draws.carried_over()

    def restore(self, done: int, draws: int, read: ReadGroups) -> None:
        """Go on after `done` steps; all ranks call it.

        Args:
            done: Steps that were trained.
            draws: How often prompts were drawn.
            read: Reads what `carried_over` gave.

        Raises:
            UserError: It is of another algorithm.
        """
        self._slot = done + self._run.plan.max_staleness
        self._draws.restore(draws, read)
        self._steps.restore(done, read, self.run)

    def restore_history(self, history: Mapping[str, Mapping[str, Any]]) -> None:
        """Take back what `history` gave, of all ranks together; nothing of a checkpoint that has none."""
        self._nodes.training.watch.restore(history.get("updates", {}))
        self.policies.restore_gaps(history.get("gaps", {}))

    def replay(self, node_id: str, step: int, draw: int, put: Callable[[Layout, Step], None]) -> Step:
        """Run one node as in a step of an earlier run; the step, which has what the node makes.

        Args:
            node_id: Id of the node.
            step: Number of the step, from 0.
            draw: Number of the draw of prompts that it ran at.
            put: Gives the step what the node reads, in this layout.
        """
        node, run = self._run.graph.nodes[node_id], self._run
        tasks = (task for task in run.plan.every() if isinstance(task, RunNode | TrainNode))
        task = next(task for task in tasks if task.node_id == node_id)
        self._steps.begin(step, draw)
        put(task.layout, self._steps[step])
        for policy in node.generates:
            changed = run.graph.changed_before(node)[policy]
            self.policies.sync(policy, step, self._metrics.of(step), changed)
        self.run(replace(task, frees=()), step)
        return self._steps[step]

    def _run_slot(self, slot: int) -> None:
        """All tasks of this rank: of step `slot`, and of those that lag behind it."""
        if slot < self._run.steps:
            self._steps.begin(slot, self._draws.count)
            self._draws.count += not self._draws.repeats
        self._slot_began, self._waited_before = time.perf_counter(), self._trace.waited_s
        for task in self.plan:
            step = slot - task.lag
            if not 0 <= step < self._run.steps:
                continue
            if isinstance(task, Reduce):
                metrics = self._metrics.of(step)
                metrics.seconds("time/step", time.perf_counter() - self._slot_began)
                metrics.seconds("time/elapsed", time.perf_counter() - self._began)
            self.run(task, step)
            if isinstance(task, Reduce):
                self._steps.end(step)

    @contextmanager
    def _watching(self, task: Task, step: int) -> Iterator[None]:
        """Time a task, and note on an error where this rank was."""
        started, rank = time.perf_counter(), self._run.rank
        report(rank, f"step {step + 1}, {task}")
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            error.add_note(f"rank {rank}, step {step + 1}: {' '.join(str(task).split())}")
            raise
        ended = time.perf_counter()
        report(rank, f"step {step + 1}")
        self._trace.span(str(task), type(task).__name__, started, ended, step=step)
        if (name := time_metric(task)) is not None:  # once a step is reduced, nothing may begin to log of it again
            self._metrics.of(step).seconds(name, ended - started)

    def _fill(self, task: Fill, step: Step) -> None:
        self._draws.fill(task, step, self.run)
        for repeated in task.tasks:
            if isinstance(repeated, RunNode):
                self._nodes.note_age(repeated, step)

    def _reduce(self, step: Step) -> None:
        clock, run = self._run.transport.clock, self._run
        clock.settle()
        self._steps.log_exchanges(step)
        self._draws.log(step)
        waited = self._trace.waited_s - self._waited_before
        worked = time.perf_counter() - self._slot_began - waited
        run.context.memories.learn(run.module.memories(), step.number)
        self._reduced = self._metrics.reduce(step.number, run.transport, worked, preemption.received())
        clock.settle()  # of this very collective, which belongs to no later step
        self._draws.learn(self._reduced)
        self.policies.check(self._reduced)
        self._reduced = dict(sorted(self._reduced.items()))

    def _doing(self, task: Task) -> str:
        """The task in an error: its node and role, or what it brings where."""
        if not isinstance(task, RunNode | TrainNode):
            return " ".join(str(task).split())
        node = self._run.graph.nodes[task.node_id]
        return f"node `{task.node_id}`{f' of role `{node.models}`' if node.models else ''}"

    def _remedies(self, task: Task) -> list[str]:
        """What lowers the memory that a task takes."""
        if isinstance(task, SyncWeights):
            engine = self.policies[task.policy].engine
            return ["lower `trainer.sync_bucket_bytes`", *to_generate(self._run.strategy, engine)]
        if not isinstance(task, RunNode | TrainNode):
            return to_hold_rows()
        node = self._run.graph.nodes[task.node_id]
        if node.generates:
            return to_generate(self._run.strategy, self.policies[node.generates[0]].engine)
        if node.role is None:
            return to_hold_rows()
        if isinstance(task, TrainNode):
            return to_train(self._run.strategy, getattr(self._run.module, node.role))
        return to_score(self._run.strategy)


def time_metric(task: Task) -> str | None:
    """The metric of a task's time; None where it has none."""
    if isinstance(task, RunNode | TrainNode):
        return f"time/{task.node_id}"
    if isinstance(task, SyncWeights):
        return "time/sync"
    return "time/load" if isinstance(task, Load) else None
