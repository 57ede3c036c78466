"""One rank's training: what it builds, the loop over its steps, and what it leaves behind."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

from rlflow.callbacks.callback import Callback, RunningTrainer
from rlflow.callbacks.hooks import Callbacks
from rlflow.checkpoint import AUTO
from rlflow.controller import Controller
from rlflow.controller.inputs import NodeInputs
from rlflow.controller.policies import Policies
from rlflow.controller.run import Run
from rlflow.controller.training import StepGivenUp
from rlflow.controller.validation import measure
from rlflow.data.loader import Prefetch
from rlflow.errors import Preempted, UserError
from rlflow.loggers.console import Console
from rlflow.loggers.curves import CURVES_FILE, draw_curves
from rlflow.loggers.lightning import LoggerLike
from rlflow.loggers.trace import SAVE, Trace
from rlflow.memory.out_of_memory import memory_watched, to_hold_rows
from rlflow.metrics import Metrics
from rlflow.module import chooses_prompts, handles
from rlflow.process import preemption, startup
from rlflow.process.freed_memory import keep_freed_memory, return_freed_memory
from rlflow.process.status import AT_FIRST, report
from rlflow.run.folder import RunFolder, from_here
from rlflow.run.recording import Recording, closing_lines, compared
from rlflow.run.resume import Resume
from rlflow.run.saving import Saving
from rlflow.run.schedules import check_made
from rlflow.run.setup import join, load_roles, locked_folder, open_folder, set_up_engines
from rlflow.run.state import RunState, Snapshot
from rlflow.run.tables import memory_table, size_table, trusted_code


def fit(
    run: Run,
    callbacks: Callbacks,
    loggers: Sequence[LoggerLike],
    state: RunningTrainer,
    resolved_config: str | None,
) -> dict[str, Any]:
    """Train to the end; the run's summary. Called by all ranks.

    Args:
        run: The run.
        callbacks: Of the user.
        loggers: Beside the run's own.
        state: The trainer, which callbacks see; where the run stands is written there.
        resolved_config: YAML; None for a run without a config.
    """
    strategy = run.strategy
    report(strategy.global_rank, AT_FIRST)
    if strategy.root_device.type == "cpu":
        return_freed_memory() if strategy.divides_weights else keep_freed_memory()
    join(run, resolved_config)
    with locked_folder(run) as lock:
        resume = Resume.of(run)
        return _fit(run, open_folder(run, lock, resume.goes_on), resume, callbacks, loggers, state)


def _fit(
    run: Run,
    folder: RunFolder,
    resume: Resume,
    callbacks: Callbacks,
    loggers: Sequence[LoggerLike],
    state: RunningTrainer,
) -> dict[str, Any]:
    """As `fit`, in the run's folder."""
    settings, strategy, rank = run.settings, run.strategy, run.rank
    with ExitStack() as stack:
        log = folder.logs / f"rank{rank}.log"
        console = stack.enter_context(Console(log, run.steps, resume.done, shows=run.is_first))
        trace = run.transport.watch = Trace(folder.traces, rank, run.transport.world_size)
        stack.callback(trace.close)
        recording = stack.enter_context(Recording(run, folder, console, loggers, resume))
        if chooses_prompts(run.module):
            run.train.choose_by(run.module.choose_prompts)
        draws = run.steps if run.plan.fill is None else None
        prompts = stack.enter_context(Prefetch(run.train, draws))
        metrics = Metrics()
        if run.context.conversations is not None:
            stack.callback(run.context.conversations.close)
        saving = Saving(run, folder, resume)
        try:
            controller = _build(run, saving, metrics, callbacks, trace, prompts, console, folder)
            remembered = RunState(run, controller, metrics, callbacks)
            for line in resume.restore(remembered):
                console.say(line)
            remembered.begin()
            summary = Fit(run, controller, remembered, saving, recording, callbacks, state, metrics, trace).train(
                resume
            )
        except BaseException as error:
            saving.abandon()
            callbacks.call(Callback.on_exception, error)
            if isinstance(error, Preempted) and error.agreed:
                run.rank_engines.close()
                strategy.barrier()
            raise
    run.rank_engines.close()
    strategy.barrier()  # rank 0, which ends last, serves the store by which the others say goodbye
    if run.is_first and not settings.fast_dev_run:
        summary = _leave_behind(folder, run, summary)
    return summary


class Fit:
    """The loop over the steps of a run, with validations, saves and callbacks between them.

    Args:
        run: This rank.
        controller: Runs the steps.
        remembered: Takes snapshots of the run.
        saving: Writes checkpoints and models.
        recording: Has what loggers and terminal are given.
        callbacks: Told of what happens.
        state: That they see.
        metrics: Of this rank, by step.
        trace: Of this rank.
    """

    def __init__(
        self,
        run: Run,
        controller: Controller,
        remembered: RunState,
        saving: Saving,
        recording: Recording,
        callbacks: Callbacks,
        state: RunningTrainer,
        metrics: Metrics,
        trace: Trace,
    ) -> None:
        self._run = run
        self._settings = run.settings
        self._controller = controller
        self._remembered = remembered
        self._saving = saving
        self._recording = recording
        self._callbacks = callbacks
        self._state = state
        self._metrics = metrics
        self._trace = trace

    def train(self, resume: Resume) -> dict[str, Any]:
        """All steps that are not done; the run's summary."""
        settings, state, steps = self._settings, self._state, self._run.steps
        self._stand_at(resume.done)
        self._callbacks.call(Callback.on_fit_start)
        after = {}
        if resume.checkpoint is None:
            after = self._remembered.before = self._validate(0)
            startup.passed("validation")
        self._recording.begin(after)
        done = resume.done
        preemption.begin(settings.grace_s)
        while done < steps and not state.should_stop:
            metrics = self._step(done)
            done += 1
            check_made(self._run, self._controller.tried, done)
            self._stand_at(done)
            state.callback_metrics |= metrics
            self._callbacks.call(Callback.on_step_end, done, metrics)
            state.should_stop |= _too_long(metrics, settings.max_seconds)
            last = done == steps or state.should_stop
            validates = last or (settings.val_check_interval is not None and done % settings.val_check_interval == 0)
            if validates:
                after = self._validate(done)
                metrics |= after
            self._recording.step(done, metrics, records=validates or done % settings.log_every_n_steps == 0)
            self._remembered.monitored = self._saving.monitored(state.callback_metrics, self._remembered.monitored)
            if self._saving.is_due(done, metrics["time/elapsed"], state.should_stop or done == steps):
                self._save(self._remembered.take(done))
            if self._controller.asked and done < steps and not state.should_stop:
                self._end(self._remembered.take(done), self._controller.asked)
        self._controller.close()
        self._saving.wait()
        saved = settings.saves_checkpoints and done > resume.done  # with the last checkpoint
        if not saved and not settings.fast_dev_run:
            self._saving.save_models()
        self._callbacks.call(Callback.on_fit_end)
        summary = {"steps": done, **compared(self._remembered.before, after)}
        if self._run.validation is not None:
            summary["problems"] = self._run.validation.size
        return summary

    def _stand_at(self, done: int) -> None:
        """Let callbacks see where the run stands; every rank knows how often prompts were drawn."""
        draws = done if self._run.plan.fill is None else self._controller.draws
        self._state.global_step = done
        self._state.current_epoch = max(0, draws - 1) // self._run.train.steps_per_epoch

    def _step(self, done: int) -> dict[str, float]:
        """The metrics of the step after `done`; if it is given up, the run ends as it stood before."""
        before = [self._remembered.take(done)] if done and preemption.is_handled() else []
        try:
            return self._controller.step(done, before.clear)
        except StepGivenUp as given_up:
            self._end(next(iter(before), None), given_up.number)

    def _end(self, snapshot: Snapshot | None, asked: int) -> NoReturn:
        """A rank was asked to end by a signal; all of them do, with what is not saved yet saved.

        Args:
            snapshot: Of this rank, with weights and optimizers as they were then; None before the first step.
            asked: The signal's number.
        """
        preemption.agree(asked)
        what = "nothing was saved; start it again"
        if snapshot is not None and not self._settings.fast_dev_run:
            if self._saving.saved != snapshot.done:
                self._save(snapshot, with_models=False)
            self._saving.wait()
            how = "the same command" if self._settings.ckpt_path == AUTO else "`--trainer.ckpt_path last`"
            what = f"{from_here(self._saving.folder_of(snapshot.done))} is saved; continue with {how}"
        ended = Preempted(asked, what, agreed=True)
        preemption.saved(str(ended))
        raise ended

    def _save(self, snapshot: Snapshot, with_models: bool = True) -> None:
        """Callbacks and validation have seen the steps that are done, and keep what they saw."""
        done = snapshot.done
        rank, doing, started = self._run.transport.rank, f"saving after step {done}", time.perf_counter()
        report(rank, doing)
        with memory_watched(doing, to_hold_rows, self._run.strategy):
            self._saving.save(self._remembered.agreed(snapshot), with_models)
        self._trace.span("save checkpoint", SAVE, started, time.perf_counter(), step=done)
        report(rank, f"step {done}")

    def _validate(self, done: int) -> dict[str, float]:
        if self._run.validation is None:
            return {}
        policies, name = self._controller.policies, self._run.follows
        follows = None if name is None else policies.get(name)
        if self._run.scores_validation and follows is not None:
            policies.bring(follows.name, done, self._metrics.of(done))
        metrics = measure(self._run, 0 if follows is None else follows.version_after(done), done)
        if follows is not None and self._run.graph.policies() != (follows.name,):
            follows.sleep()  # else the next step generates with it first, and lets it sleep
        self._state.callback_metrics |= metrics
        self._callbacks.call(Callback.on_validation_end, done, metrics)
        return metrics


def _build(
    run: Run,
    saving: Saving,
    metrics: Metrics,
    callbacks: Callbacks,
    trace: Trace,
    prompts: Prefetch,
    console: Console,
    folder: RunFolder,
) -> Controller:
    """Load models and engine, and give them to a controller; on the terminal, what the run comes to."""
    settings = run.settings
    for line in (*trusted_code(run), *size_table(run), *memory_table(run)):
        console.say(line)
    startup.passed("ranks")
    load_roles(run)
    for role in run.paths:
        if line := handles(run.module)[role].unknown:
            console.say(f"`{role}`: {line}")
    saving.require_space()
    startup.passed("models")
    set_up_engines(run)
    startup.passed("engine")
    startup.collect_again()
    policies = Policies(run, callbacks)
    stored_in = None if settings.fast_dev_run else folder.inputs
    inputs = NodeInputs(run, stored_in, settings.keep_inputs, settings.keep_inputs_of)
    return Controller(run, policies, prompts, metrics, trace, callbacks, inputs)


def _leave_behind(folder: RunFolder, run: Run, numbers: dict[str, Any]) -> dict[str, Any]:
    """The files that sum the run up, and on the terminal where they are; the summary."""
    try:
        draw_curves(folder.path)
    except UserError as error:  # of metrics that were damaged during the run, which is done
        print(f"warning: no {CURVES_FILE}: {error}")
    summary = folder.write_summary(numbers, run.paths[run.lead])
    for line in closing_lines(folder, summary):
        print(line)
    return summary


def _too_long(metrics: dict[str, float], max_seconds: float | None) -> bool:
    """Decided from the ranks' largest, so by all alike."""
    return max_seconds is not None and metrics["time/elapsed"] >= max_seconds
