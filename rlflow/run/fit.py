"""One rank's training: what it builds, the loop over its steps, and what it leaves behind."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

from rlflow.callbacks.callback import Callback
from rlflow.callbacks.hooks import Callbacks
from rlflow.checkpoint import AUTO
from rlflow.controller import Controller
from rlflow.controller.bad_updates import BadUpdates
from rlflow.controller.inputs import NodeInputs
from rlflow.controller.observers import Observers
from rlflow.controller.program import Program
from rlflow.controller.training import StepGivenUp
from rlflow.data.prefetch import Prefetch
from rlflow.errors import Preempted, UserError
from rlflow.loggers.console import Console
from rlflow.loggers.curves import CURVES_FILE, draw_curves
from rlflow.loggers.trace import SAVE, Trace
from rlflow.memory.out_of_memory import memory_watched, to_hold_rows
from rlflow.metrics import Metrics
from rlflow.module import chooses_prompts, handles
from rlflow.process import preemption, startup
from rlflow.process.freed_memory import keep_freed_memory, return_freed_memory
from rlflow.process.status import AT_FIRST, report
from rlflow.run.folder import RunFolder, from_here
from rlflow.run.memory_table import memory_table
from rlflow.run.policies import PolicyBuilder
from rlflow.run.prepared_run import Prepared
from rlflow.run.recording import LoggerLike, Recording
from rlflow.run.resume import Resume
from rlflow.run.saving import Saving
from rlflow.run.schedules import check_made, counted
from rlflow.run.setup import Joined, join
from rlflow.run.size_table import size_table
from rlflow.run.standing import Standing
from rlflow.run.summary import closing_lines, compared
from rlflow.run.trusted_code import trusted_code
from rlflow.run.validation import measure
from rlflow.run_state import RunState


def fit(
    prepared: Prepared,
    callbacks: Callbacks,
    loggers: Sequence[LoggerLike],
    state: RunState,
    resolved_config: str | None,
) -> dict[str, Any]:
    """Train to the end; the run's summary. Called by all ranks.

    Args:
        prepared: The run.
        callbacks: Of the user.
        loggers: Beside the run's own.
        state: That callbacks see.
        resolved_config: YAML; None for a run without a config.
    """
    strategy = prepared.strategy
    report(strategy.global_rank, AT_FIRST)
    if strategy.root_device.type == "cpu":
        return_freed_memory() if strategy.divides_weights else keep_freed_memory()
    joined = join(prepared, resolved_config)
    with joined.locked_folder() as lock:
        resume = Resume.of(joined)
        return _fit(joined, joined.open_folder(lock, resume.goes_on), resume, callbacks, loggers, state)


def _fit(
    joined: Joined,
    folder: RunFolder,
    resume: Resume,
    callbacks: Callbacks,
    loggers: Sequence[LoggerLike],
    state: RunState,
) -> dict[str, Any]:
    """As `fit`, in the run's folder."""
    prepared, settings, strategy = joined.prepared, joined.prepared.settings, joined.prepared.strategy
    rank = joined.transport.rank
    with ExitStack() as stack:
        log = folder.logs / f"rank{rank}.log"
        console = stack.enter_context(Console(log, prepared.steps, resume.done, shows=joined.is_first))
        trace = joined.transport.watch = Trace(folder.traces, rank, joined.transport.world_size)
        stack.callback(trace.close)
        recording = stack.enter_context(Recording(joined, folder, console, loggers, resume))
        if chooses_prompts(prepared.module):
            prepared.train.choose_by(prepared.module.choose_prompts)
        draws = prepared.steps if prepared.plan.fill is None else None
        prompts = stack.enter_context(Prefetch(prepared.train, draws))
        metrics = Metrics()
        if joined.context.conversations is not None:
            stack.callback(joined.context.conversations.close)
        saving = Saving(joined, folder, metrics, callbacks, resume)
        try:
            controller = _build(joined, saving, metrics, callbacks, trace, prompts, console, folder)
            for line in resume.restore(controller, metrics, callbacks):
                console.say(line)
            saving.begin()
            summary = Fit(joined, controller, saving, recording, callbacks, state, metrics, trace).train(resume)
        except BaseException as error:
            saving.abandon()
            callbacks.call(Callback.on_exception, error)
            if isinstance(error, Preempted) and error.agreed:
                joined.engines.close()
                strategy.barrier()
            raise
    joined.engines.close()
    strategy.barrier()  # rank 0, which ends last, serves the store by which the others say goodbye
    if joined.is_first and not settings.fast_dev_run:
        summary = _leave_behind(folder, prepared, summary)
    return summary


class Fit:
    """The loop over the steps of a run, with validations, saves and callbacks between them.

    Args:
        joined: This rank.
        controller: Runs the steps.
        saving: Writes checkpoints and models.
        recording: Has what loggers and terminal are given.
        callbacks: Told of what happens.
        state: That they see.
        metrics: Of this rank, by step.
        trace: Of this rank.
    """

    def __init__(
        self,
        joined: Joined,
        controller: Controller,
        saving: Saving,
        recording: Recording,
        callbacks: Callbacks,
        state: RunState,
        metrics: Metrics,
        trace: Trace,
    ) -> None:
        self._joined = joined
        self._prepared = joined.prepared
        self._settings = joined.prepared.settings
        self._controller = controller
        self._saving = saving
        self._recording = recording
        self._callbacks = callbacks
        self._state = state
        self._metrics = metrics
        self._trace = trace

    def train(self, resume: Resume) -> dict[str, Any]:
        """All steps that are not done; the run's summary."""
        settings, state, steps = self._settings, self._state, self._prepared.steps
        self._stand_at(resume.done)
        self._callbacks.call(Callback.on_fit_start)
        after = {}
        if resume.checkpoint is None:
            after = self._saving.before = self._validate(0)
            startup.passed("validation")
        self._recording.begin(after)
        done = resume.done
        preemption.begin(settings.grace_s)
        while done < steps and not state.should_stop:
            metrics = self._step(done)
            done += 1
            check_made(self._prepared, self._controller.tried, done)
            self._stand_at(done)
            state.metrics |= metrics
            self._callbacks.call(Callback.on_step_end, done, metrics)
            state.should_stop |= _too_long(metrics, settings.max_seconds)
            last = done == steps or state.should_stop
            validates = last or (settings.val_check_interval is not None and done % settings.val_check_interval == 0)
            if validates:
                after = self._validate(done)
                metrics |= after
            self._recording.step(done, metrics, records=validates or done % settings.log_every_n_steps == 0)
            self._saving.monitor(state.metrics)
            if self._saving.is_due(done, metrics["time/elapsed"], state.should_stop or done == steps):
                self._save(self._saving.standing(done, self._controller))
            if self._controller.asked and done < steps and not state.should_stop:
                self._end(self._saving.standing(done, self._controller), self._controller.asked)
        self._controller.close()
        self._saving.wait()
        saved = settings.saves_checkpoints and done > resume.done  # with the last checkpoint
        if not saved and not settings.fast_dev_run:
            self._saving.save_models()
        self._callbacks.call(Callback.on_fit_end)
        summary = {"steps": done, **compared(self._saving.before, after)}
        if self._prepared.validation is not None:
            summary["problems"] = self._prepared.validation.size
        return summary

    def _stand_at(self, done: int) -> None:
        """Let callbacks see where the run stands; every rank knows how often prompts were drawn."""
        draws = done if self._prepared.plan.fill is None else self._controller.draws
        self._state.step = done
        self._state.epoch = max(0, draws - 1) // self._prepared.train.steps_per_epoch

    def _step(self, done: int) -> dict[str, float]:
        """The metrics of the step after `done`; if it is given up, the run ends as it stood before."""
        before = [self._saving.standing(done, self._controller)] if done and preemption.is_handled() else []
        try:
            return self._controller.step(done, before.clear)
        except StepGivenUp as given_up:
            self._end(next(iter(before), None), given_up.number)

    def _end(self, standing: Standing | None, asked: int) -> NoReturn:
        """A rank was asked to end by a signal; all of them do, with what is not saved yet saved.

        Args:
            standing: Of this rank, with weights and optimizers as they were then; None before the first step.
            asked: The signal's number.
        """
        preemption.agree(asked)
        what = "nothing was saved; start it again"
        if standing is not None and not self._settings.fast_dev_run:
            if self._saving.saved != standing.done:
                self._save(standing, with_models=False)
            self._saving.wait()
            how = "the same command" if self._settings.ckpt_path == AUTO else "`--trainer.ckpt_path last`"
            what = f"{from_here(self._saving.folder_of(standing.done))} is saved; continue with {how}"
        ended = Preempted(asked, what, agreed=True)
        preemption.saved(str(ended))
        raise ended

    def _save(self, standing: Standing, with_models: bool = True) -> None:
        """Callbacks and validation have seen the steps that are done, and keep what they saw."""
        done = standing.done
        rank, doing, started = self._joined.transport.rank, f"saving after step {done}", time.perf_counter()
        report(rank, doing)
        with memory_watched(doing, to_hold_rows, self._prepared.strategy):
            self._saving.save(standing, self._controller, with_models)
        self._trace.span("save checkpoint", SAVE, started, time.perf_counter(), step=done)
        report(rank, f"step {done}")

    def _validate(self, done: int) -> dict[str, float]:
        if self._prepared.validation is None:
            return {}
        policies, name = self._controller.policies, self._prepared.follows
        follows = None if name is None else policies.get(name)
        if self._prepared.scores_validation and follows is not None:
            policies.bring(follows.name, done, self._metrics.of(done))
        metrics = measure(self._joined, 0 if follows is None else follows.version_after(done))
        if follows is not None and self._prepared.graph.policies() != (follows.name,):
            follows.sleep()  # else the next step generates with it first, and lets it sleep
        self._state.metrics |= metrics
        self._callbacks.call(Callback.on_validation_end, done, metrics)
        return metrics


def _build(
    joined: Joined,
    saving: Saving,
    metrics: Metrics,
    callbacks: Callbacks,
    trace: Trace,
    prompts: Prefetch,
    console: Console,
    folder: RunFolder,
) -> Controller:
    """Load models and engine, and give them to a controller; on the terminal, what the run comes to."""
    prepared = joined.prepared
    module, settings, strategy = prepared.module, prepared.settings, prepared.strategy
    for line in (*trusted_code(prepared), *size_table(prepared), *memory_table(prepared)):
        console.say(line)
    startup.passed("ranks")
    trained = prepared.graph.trained_roles()
    for role in prepared.paths:
        per_step = prepared.data.prompts_per_step
        updates = counted(module, prepared.graph, role, per_step, prepared.steps) if role in trained else None
        joined.load(role, updates)
        if line := handles(module)[role].unknown:
            console.say(f"`{role}`: {line}")
    saving.require_space()
    startup.passed("models")
    joined.set_up_engines()
    startup.passed("engine")
    startup.collect_again()
    program = Program(
        module,
        prepared.graph,
        prepared.plan,
        joined.transport.rank,
        prepared.steps,
        settings.seed,
        settings.balance,
        settings.partial_rollout,
        BadUpdates(settings.run_dir, joined.transport.rank, settings.skip_spikes, settings.max_skipped),
    )
    policies = PolicyBuilder(joined).policies(callbacks)
    inputs = NodeInputs(None if settings.fast_dev_run else folder.inputs, settings.keep_inputs, settings.keep_inputs_of)
    observers = Observers(metrics, trace, callbacks, inputs)
    return Controller(program, policies, strategy, prompts, joined.context, joined.transport, observers)


def _leave_behind(folder: RunFolder, prepared: Prepared, numbers: dict[str, Any]) -> dict[str, Any]:
    """The files that sum the run up, and on the terminal where they are; the summary."""
    try:
        draw_curves(folder.path)
    except UserError as error:  # of metrics that were damaged during the run, which is done
        print(f"warning: no {CURVES_FILE}: {error}")
    summary = folder.write_summary(numbers, prepared.paths[prepared.lead])
    for line in closing_lines(folder, summary):
        print(line)
    return summary


def _too_long(metrics: dict[str, float], max_seconds: float | None) -> bool:
    """Decided from the ranks' largest, so by all alike."""
    return max_seconds is not None and metrics["time/elapsed"] >= max_seconds
