"""The controller of one rank, which runs its plan. No rank commands another; all follow the same global order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rlflow.callbacks.callback import Callback
from rlflow.callbacks.hooks import Callbacks
from rlflow.checkpoint.stored_groups import step_name
from rlflow.controller.inputs import NodeInputs
from rlflow.controller.nodes import Nodes
from rlflow.controller.policies import Policies
from rlflow.controller.prompt_sampler import PromptSampler
from rlflow.controller.run import Run
from rlflow.controller.step import Step, no_groups
from rlflow.controller.training import UpdateWatch
from rlflow.dag.node import BATCH
from rlflow.dag.tasks import (
    BroadcastRows,
    DeferUnfinished,
    DynamicSampling,
    Exchange,
    Load,
    Reduce,
    RunNode,
    Sleep,
    SyncWeights,
    Task,
    TrainNode,
)
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

    The plan is made before the run and is the same on every rank. Each rank runs the tasks in which it takes part, in
    the plan's order. One pass through the plan is a slot. If steps overlap, a slot has tasks of two steps; with
    `max_staleness` 1:

        slot                  0           1           2
        tasks without lag     generate 0  generate 1  generate 2
        tasks of lag 1        -           train 0     train 1

    Args:
        run: The run on this rank, which has joined the others.
        policies: Policies that generate.
        loader: Loader of the training rows.
        metrics: Metrics of this rank, reduced once a step.
        trace: Trace of this rank's tasks.
        callbacks: Called at tasks and nodes.
        inputs: Stores the inputs of nodes in some steps.
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
        self._steps: dict[int, Step] = {}  # steps in progress by number: several if steps overlap
        self._sampler = PromptSampler(run, loader)
        self._nodes = Nodes(run, policies, callbacks, self._sampler, inputs)
        self._ahead = _made_ahead(run)
        self._slot = 0  # the step whose rows are generated next
        self._began = time.perf_counter()
        self._slot_began = self._waited_before = 0.0
        self._reduced: dict[str, float] = {}

    @property
    def draws(self) -> int:
        """Number of draws of prompts so far: one a step, or more if a filter or partial rollout draws again."""
        return self._sampler.count

    @property
    def tried(self) -> Mapping[str, int]:
        """Number of updates in the last step by role that this rank trained; skipped updates are counted too."""
        return self._nodes.training.tried

    @property
    def updates(self) -> UpdateWatch:
        """Gradient norms by role, for a checkpoint; after a resume it also has norms of roles on other ranks."""
        return self._nodes.training.watch

    def step(self, step: int, at_first_update: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Run this rank's tasks until `step` is trained; called by all ranks, for one step after the other.

        With `max_staleness` N, the first call also generates the N steps after it.

        Args:
            step: Number of the step, from 0.
            at_first_update: Called before the first update of this rank in the step.

        Returns:
            The step's metrics over all ranks, by name: `{"actor/loss": 0.02, ..., "time/step": 41.3}`; the same on
            every rank.

        Raises:
            StepGivenUp: A rank received a signal before the first update; raised on all ranks.
        """
        self._nodes.training.begin(at_first_update)
        while self._slot <= step + self._run.plan.max_staleness:
            self._run_slot(self._slot)
            self._slot += 1
        return self._reduced

    def run(self, task: Task, step: int) -> None:
        """Run one task of this rank's plan for a step in progress, and log its time as `time/<node>` or the like."""
        self._callbacks.call(Callback.on_task_start, str(task), step + 1)
        doing = f"step {step + 1}, {self._doing(task)}"
        with self._watching(task, step), memory_watched(doing, lambda: self._remedies(task), self._run.strategy):
            now = self._steps[step]
            match task:
                case Load():
                    self._sampler.load(task, now)
                case SyncWeights():
                    self.policies.sync(task.policy, step, now.metrics, task.changed)
                case Sleep():
                    self.policies[task.policy].sleep()
                case BroadcastRows():
                    now.broadcast_rows(task)
                case Exchange():
                    now.exchange(task)
                case RunNode():
                    self._nodes.run(task, now)
                case TrainNode():
                    self._nodes.train(task, now)
                case DeferUnfinished():
                    self._nodes.defer_unfinished(task, now)
                case DynamicSampling():
                    self._sample_until_full(task, now)
                case Reduce():
                    self._reduce(now)

    def close(self) -> None:
        """Free the values of steps that are generated and will not be trained; called at the end of the run."""
        for step in self._steps.values():
            step.buffer.clear()

    def state_dict(self) -> dict[str, Any]:
        """Numbers of steps that are done, of draws of prompts, and of the prompts of a draw."""
        return {
            "step": self._done,
            "draws": self._sampler.count,
            "prompts_per_step": self._run.data.prompts_per_step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after the steps that were done; called before the first `step`."""
        self._slot = state["step"] + self._run.plan.max_staleness
        self._sampler.count = state["draws"]

    def carried_over(self) -> dict[str, Groups]:
        """Groups of rows that later steps need, by name, for a checkpoint.

        `surplus` has groups beyond those of the last step. `unfinished` has groups with responses that were cut off.
        `step-00000007` has the values that this rank made in a step that is generated and not yet trained.
        """
        carried = self._sampler.carried_over()
        if self._ahead is not None:
            carried |= {step_name(step): self._steps[step].groups(self._ahead) for step in self._in_progress()}
        return carried

    def take_over(self, read: ReadGroups) -> None:
        """Restore the groups of `carried_over`, after `load_state_dict`; called by all ranks.

        Args:
            read: Reads the groups with a name from the checkpoint.

        Raises:
            UserError: The groups are of another algorithm.
        """
        self._sampler.take_over(read)
        for step in self._in_progress():
            self._begin(step, draw=step)  # it is a later one where steps draw as often as they need
            if self._ahead is not None:
                groups = read(step_name(step), self._ahead)
                assert groups is not None, step
                self._steps[step].put(groups)
            for task in self._run.plan.crossing():
                if self._run.rank in task.ranks:
                    self.run(task, step)

    @property
    def _done(self) -> int:
        """Number of steps that are trained; slots are `max_staleness` ahead of it."""
        return self._slot - self._run.plan.max_staleness

    def replay(self, node_id: str, step: int, draw: int, put: Callable[[Layout, Step], None]) -> Step:
        """Run one node as in a step of an earlier run, for `rlflow replay`, in one process.

        Args:
            node_id: Name of the node.
            step: Number of the step, from 0.
            draw: Number of the draw of prompts that the node ran on.
            put: Puts the values that the node reads into the step, in the layout that it is given.

        Returns:
            The step, which has the node's value in its buffer.
        """
        node, run = self._run.graph.nodes[node_id], self._run
        tasks = (task for task in run.plan.every() if isinstance(task, RunNode | TrainNode))
        task = next(task for task in tasks if task.node_id == node_id)
        self._begin(step, draw)
        put(task.layout, self._steps[step])
        for policy in node.generates:
            changed = run.graph.changed_before(node)[policy]
            self.policies.sync(policy, step, self._metrics.of(step), changed)
        self.run(replace(task, frees=()), step)
        return self._steps[step]

    def _begin(self, step: int, draw: int) -> None:
        """Begin a step, whose first rows come from the draw `draw`."""
        self._steps[step] = Step(self._run, step, draw, self._metrics.of(step))

    def _in_progress(self) -> range:
        """Numbers of the steps that are generated and not yet trained."""
        return range(self._done, min(self._slot, self._run.steps))

    def _run_slot(self, slot: int) -> None:
        """Run all tasks of this rank once: those without lag for step `slot`, those of lag n for step `slot` - n."""
        if slot < self._run.steps:
            self._begin(slot, self._sampler.count)
            self._sampler.count += not self._sampler.repeats
        self._slot_began, self._waited_before = time.perf_counter(), self._trace.waited_s
        for task in self.plan:
            step = slot - task.lag
            if 0 <= step < self._run.steps:
                self.run(task, step)

    @contextmanager
    def _watching(self, task: Task, step: int) -> Iterator[None]:
        """A context for a task: traces its time and the bytes it sends, logs the time, and names the task in errors."""
        started, rank = time.perf_counter(), self._run.rank
        buffer = self._steps[step].buffer
        sent_before = buffer.bytes_sent
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
        sent = {"bytes": buffer.bytes_sent - sent_before} if isinstance(task, Exchange) else {}
        self._trace.span(str(task), type(task).__name__, started, ended, step=step, **sent)
        if (name := time_metric(task)) is not None:  # a reduced step must not log again
            self._metrics.of(step).seconds(name, ended - started)

    def _sample_until_full(self, task: DynamicSampling, step: Step) -> None:
        self._sampler.sample_until_full(task, step, self.run)
        for repeated in task.tasks:
            if isinstance(repeated, RunNode):
                self._nodes.note_age(repeated, step)

    def _reduce(self, step: Step) -> None:
        """Reduce a step's metrics over all ranks, and remove the step."""
        clock, run = self._run.transport.clock, self._run
        step.metrics.seconds("time/step", time.perf_counter() - self._slot_began)
        step.metrics.seconds("time/elapsed", time.perf_counter() - self._began)
        clock.settle()
        step.log_exchanges(sum(each.buffer.peak_held_bytes for each in self._steps.values()))
        self._sampler.log(step)
        waited = self._trace.waited_s - self._waited_before
        worked = time.perf_counter() - self._slot_began - waited
        run.context.memories.learn(run.module.memories(), step.number)
        self._reduced = self._metrics.reduce(step.number, run.transport, worked, preemption.received())
        run.context.learn_names(self._metrics)
        clock.settle()  # the wait for this collective must not count in a later step
        self._sampler.learn(self._reduced)
        self.policies.check(self._reduced)
        self._reduced = dict(sorted(self._reduced.items()))
        self._steps.pop(step.number).buffer.clear()
        run.context.end_step(step.number)

    def _doing(self, task: Task) -> str:
        """The task in an out-of-memory error: its node and role, or its line of the plan."""
        if not isinstance(task, RunNode | TrainNode):
            return " ".join(str(task).split())
        node = self._run.graph.nodes[task.node_id]
        return f"node `{task.node_id}`{f' of role `{node.models}`' if node.models else ''}"

    def _remedies(self, task: Task) -> list[str]:
        """Settings that lower the memory of a task, for an out-of-memory error."""
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
    """The name of the metric for a task's time; None if it has none."""
    if isinstance(task, RunNode | TrainNode):
        return f"time/{task.node_id}"
    if isinstance(task, SyncWeights):
        return "time/sync"
    return "time/load" if isinstance(task, Load) else None


def _made_ahead(run: Run) -> Groups | None:
    """Groups without rows, for the values that this rank makes in a step generated ahead of training; None for none."""
    every = list(run.plan.every())
    ahead = [task for task in every if isinstance(task, Load | RunNode) and not task.lag]
    if not run.plan.crossing() or not any(run.rank in task.ranks for task in ahead):
        return None
    behind = {task.node_id for task in every if isinstance(task, RunNode | TrainNode) and task.lag}
    read = {name for node in behind for name in run.graph.nodes[node].reads}
    runs = [task.node_id for task in ahead if isinstance(task, RunNode)]
    spaces = [BATCH, *(name for name in runs if run.graph.nodes[name].makes_rows)]
    return no_groups(run, spaces, [name for name in (BATCH, *runs) if name in read])
