"""Training on one rank: models and engines are loaded, `Fit` loops over the steps, and results are written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from rlflow.callbacks.callback import Callback, RunningTrainer
from rlflow.callbacks.hooks import Callbacks
from rlflow.checkpoint import AUTO, Checkpoint, Snapshot, folder_of, remove_later
from rlflow.controller import Controller
from rlflow.controller.inputs import NodeInputs
from rlflow.controller.policies import Policies
from rlflow.controller.run import Run
from rlflow.controller.training import StepGivenUp
from rlflow.controller.validation import measure, require_other_names
from rlflow.data.loader import Prefetch
from rlflow.errors import Preempted, UserError
from rlflow.loggers.console import Console, open_console
from rlflow.loggers.curves import CURVES_FILE, draw_curves
from rlflow.loggers.lightning import LoggerLike
from rlflow.loggers.trace import SAVE, Trace
from rlflow.memory.out_of_memory import memory_watched, to_hold_rows
from rlflow.metrics import Metrics
from rlflow.module import chooses_prompts, handles
from rlflow.process import preemption, startup
from rlflow.process.freed_memory import keep_freed_memory, return_freed_memory
from rlflow.process.status import AT_FIRST, report
from rlflow.run.agreement import attempt
from rlflow.run.folder import RunFolder, from_here
from rlflow.run.preflight import check_gold_answers
from rlflow.run.recording import Recording, closing_lines, compared
from rlflow.run.resume import Resume
from rlflow.run.saving import Saving, checkpoint_of
from rlflow.run.schedules import check_made
from rlflow.run.setup import join, load_roles, locked_folder, open_folder, set_up_engines
from rlflow.run.tables import first_prompt, memory_table, size_table, trusted_code


def fit(
    run: Run,
    callbacks: Callbacks,
    loggers: Sequence[LoggerLike],
    state: RunningTrainer,
    resolved_config: str | None,
) -> dict[str, Any]:
    """Train to the end, or resume a run; called by `Trainer.fit` on all ranks.

    Errors while models load and steps run go to `on_exception` of the callbacks before they are raised.

    Args:
        run: The run, which the ranks have not joined yet.
        callbacks: Callbacks of the user.
        loggers: Loggers in addition to the run's own files `metrics.jsonl` and `metrics.csv`.
        state: The trainer as callbacks see it; its `global_step`, `callback_metrics` and the like are set here.
        resolved_config: Config of the run as YAML; None for a run without a config.

    Returns:
        The run's summary, see `Fit.train`. On rank 0 it also has `seconds`, and is written to `summary.json`, except
        with `fast_dev_run`.
    """
    strategy = run.strategy
    report(strategy.global_rank, AT_FIRST)
    if strategy.root_device.type == "cpu":
        return_freed_memory() if strategy.divides_weights else keep_freed_memory()
    join(run, resolved_config)
    with locked_folder(run) as lock:
        resume = Resume.of(run)
        return _fit(run, open_folder(run, lock, resume.goes_on), resume, callbacks, loggers, state)


def _remove_later(run: Run, folder: RunFolder, resume: Resume) -> None:
    """Remove checkpoints of steps after the one that the run was resumed from; another resume would start from them."""
    if run.is_first and resume.goes_on:
        remove_later(folder_of(folder.checkpoint, resume.done))


def _fit(
    run: Run,
    folder: RunFolder,
    resume: Resume,
    callbacks: Callbacks,
    loggers: Sequence[LoggerLike],
    state: RunningTrainer,
) -> dict[str, Any]:
    """Like `fit`, in the run's folder: load models and engines, resume from a checkpoint if there is one, and train."""
    settings, strategy, rank = run.settings, run.strategy, run.rank
    with ExitStack() as stack:
        log = folder.logs / f"rank{rank}.log"
        console = stack.enter_context(open_console(log, run.steps, resume.done, shows=run.is_first))
        state.print = console.say
        stack.callback(setattr, state, "print", print)
        trace = run.transport.watch = Trace(folder.traces, rank, run.transport.world_size)
        stack.callback(trace.close)
        stack.callback(setattr, run.transport, "watch", None)
        recording = stack.enter_context(Recording(run, folder, console, loggers, resume))
        if chooses_prompts(run.module):
            run.train.choose_by(run.module.choose_prompts)
        draws = run.steps if run.plan.dynamic_sampling is None else None
        prompts = stack.enter_context(Prefetch(run.train, draws))
        metrics = Metrics()
        stack.callback(run.context.close)
        if run.context.conversations is not None:
            stack.callback(run.context.conversations.close)
        saving = Saving(run, folder, resume)
        try:
            for line in (*trusted_code(run), *size_table(run), *memory_table(run)):
                console.say(line)
            attempt(run.transport, folder.path, partial(_look_at_data, run, console))
            startup.passed("ranks")
            with console.phase("loading models"):
                load_roles(run)
            for role in run.paths:
                for line in handles(run.module)[role].remarks:
                    console.say(f"`{role}`: {line}")
            saving.require_space()
            startup.passed("models")
            with console.phase("starting engines"):
                set_up_engines(run)
            startup.passed("engine")
            startup.collect_again()
            stored_in = None if settings.fast_dev_run else folder.inputs
            inputs = NodeInputs(run, stored_in, settings.dump_steps, settings.dump_nodes)
            controller = Controller(run, Policies(run, callbacks), prompts, metrics, trace, callbacks, inputs)
            parts = checkpoint_of(run, controller, callbacks, recording, saving, metrics)
            for line in resume.restore(parts):
                console.say(line)
            parts.begin()
            attempt(run.transport, folder.path, partial(_remove_later, run, folder, resume))
            recording.start_rest()
            summary = Fit(run, controller, parts, saving, recording, callbacks, state, metrics, trace).train(resume)
        except BaseException as error:
            saving.abandon()
            callbacks.call(Callback.on_exception, error)
            if isinstance(error, Preempted) and error.agreed:
                run.rank_engines.close()
                strategy.barrier()
            raise
    run.rank_engines.close()
    leaves = run.is_first and not settings.fast_dev_run

    def write() -> None:
        if leaves:
            summary.update(folder.write_summary(summary, run.paths[run.lead]))

    attempt(run.transport, folder.path, write)  # on any rank, what follows `fit` may ask whether the run has ended
    strategy.barrier()  # rank 0, which ends last, serves the store that the others leave through
    if leaves:
        _leave_behind(folder, summary)
    return summary


@dataclass(eq=False)
class Fit:
    """The training loop, which all ranks run together; `train` shows the order of a step.

    Attributes:
        run: The run on this rank, with models and engines loaded.
        controller: Runs the steps.
        parts: The parts of the run whose states are in checkpoints.
        saving: Writes checkpoints and models.
        recording: Passes metrics and samples to loggers and to the terminal.
        callbacks: Callbacks of the user.
        state: The trainer as callbacks see it.
        metrics: Metrics of this rank, by step.
        trace: Trace of this rank's tasks.
    """

    run: Run
    controller: Controller
    parts: Checkpoint
    saving: Saving
    recording: Recording
    callbacks: Callbacks
    state: RunningTrainer
    metrics: Metrics
    trace: Trace

    def train(self, resume: Resume) -> dict[str, Any]:
        """Run all steps that are not done yet.

        Before the first step `on_fit_start` is called, then the model is validated, unless the run resumes. A step:

            1. controller    This rank runs the tasks of its plan in order, see `Controller.step`. For GRPO: load
                             prompts, sync weights to the engines, run `rollout`, let the engines sleep, exchange rows
                             between ranks, run `rewards` and `advantages`, train `actor_loss`, reduce the metrics.
                             Each task calls `on_task_start`; a node that is not trained also calls `on_node_start` and
                             `on_node_end`, and a sync that sends weights `on_weight_sync`.
            2. callbacks     `trainer.global_step` and `callback_metrics` are set, then `on_step_end` is called with
                             the step's metrics over all ranks. It may set `trainer.should_stop`, on all ranks.
            3. validation    After every `val_check_interval` steps and after the last; then `on_validation_end`.
            4. logging       The terminal shows the step; loggers get metrics and samples, see `log_every_n_steps`.
            5. saving        A checkpoint and the models, if `Saving.is_due` says so.
            6. signals       If a rank received a signal such as SIGTERM and steps are left, the run saves and ends.

        After the last step the models are written, unless they were written with the last checkpoint. Then `on_fit_end`
        is called. With `fast_dev_run` nothing is saved. Decisions follow from numbers that all ranks have.

        Args:
            resume: The checkpoint that the run resumes from, if any; it has been restored.

        Returns:
            The run's summary: `{"steps": 200, "reward_before": 0.31, "reward_after": 0.64, ..., "problems": 64}`.

        Raises:
            Preempted: A rank received a signal; a checkpoint to resume from is saved, if a step is done.
        """
        settings, state, steps = self.run.settings, self.state, self.run.steps
        self._stand_at(resume.done)
        self.callbacks.call(Callback.on_fit_start)
        after = {}
        if resume.checkpoint is None:
            with self.recording.console.phase("validation before training"):
                after = self._validate(0)
            startup.passed("validation")
        self.recording.begin(after)
        done = resume.done
        preemption.begin(settings.grace_s)
        while done < steps and not state.should_stop:
            metrics = self._step(done)
            done += 1
            check_made(self.run, self.controller.tried, done)
            self._stand_at(done)
            state.callback_metrics |= metrics
            self.callbacks.call(Callback.on_step_end, done, metrics)
            state.callback_metrics |= metrics  # once more: callbacks such as LearningRateMonitor add their own
            state.should_stop |= _too_long(metrics, settings.max_seconds)
            last = done == steps or state.should_stop
            validates = last or (settings.val_check_interval is not None and done % settings.val_check_interval == 0)
            if validates:
                after = self._validate(done)
                require_other_names(metrics, after)
                metrics |= after
            self.recording.step(done, metrics, records=validates or done % settings.log_every_n_steps == 0)
            self.saving.monitor(state.callback_metrics)
            if self.saving.is_due(done, metrics["time/elapsed"], state.should_stop or done == steps):
                self._save(self.parts.take())
            if self.metrics.asked and done < steps and not state.should_stop:  # by a signal, on any rank
                self._end(self.parts.take(), self.metrics.asked)
        if resume.checkpoint is not None and done == resume.done:  # no step was left: the summary needs its end
            after = self._validate(done)
        self.controller.close()
        self.saving.wait()
        saved = settings.saves_checkpoints and done > resume.done  # with the last checkpoint
        if not saved and not settings.fast_dev_run:
            self.saving.save_models()
        state.checkpoints = self.saving.kept()
        self.callbacks.call(Callback.on_fit_end)
        summary = {"steps": done, **compared(self.recording.before, after)}
        if self.run.validation is not None:
            summary["problems"] = self.run.validation.size
        return summary

    def _stand_at(self, done: int) -> None:
        """Set `global_step` and `current_epoch` of the trainer, which callbacks see, after `done` steps."""
        self.state.global_step = done
        self.state.current_epoch = max(0, self._draws(done) - 1) // self.run.train.steps_per_epoch

    def _draws(self, done: int) -> int:
        """Number of draws of prompts for `done` steps."""
        return done if self.run.plan.dynamic_sampling is None else self.controller.draws

    def _step(self, done: int) -> dict[str, float]:
        """Run the step after `done`, and return its metrics over all ranks.

        If the step is given up because of a signal, see `StepGivenUp`, the run is saved as it was before the step. The
        snapshot that this needs is dropped at the step's first update.
        """
        before = [self.parts.take()] if done and preemption.is_handled() else []
        try:
            return self.controller.step(done, before.clear)
        except StepGivenUp as given_up:
            self._end(next(iter(before), None), given_up.number)

    def _end(self, snapshot: Snapshot | None, asked: int) -> NoReturn:
        """Save a checkpoint, unless the last one is of this step, and raise `Preempted`; called by all ranks.

        Args:
            snapshot: This rank's state after the last step with all its updates made; None before the first step.
            asked: Number of the signal that ends the run.
        """
        preemption.agree(asked)
        what = "nothing was saved; start it again"
        if snapshot is not None and not self.run.settings.fast_dev_run:
            done = snapshot.progress.step
            if self.saving.saved != done:
                self._save(snapshot, with_models=False)
            self.saving.wait()
            how = "the same command" if self.run.settings.ckpt_path == AUTO else "`--trainer.ckpt_path last`"
            what = f"{from_here(self.saving.folder_of(done))} is saved; continue with {how}"
        ended = Preempted(asked, what, agreed=True)
        preemption.saved(str(ended))
        raise ended

    def _save(self, snapshot: Snapshot, with_models: bool = True) -> None:
        """Write a checkpoint of a snapshot, and the models; a collective of all ranks. The trace records its time."""
        done = snapshot.progress.step
        rank, doing, started = self.run.transport.rank, f"saving after step {done}", time.perf_counter()
        report(rank, doing)
        with memory_watched(doing, to_hold_rows, self.run.strategy), self.recording.console.phase(doing):
            self.saving.save(self.parts.agreed(snapshot), with_models)
        self.trace.span("save checkpoint", SAVE, started, time.perf_counter(), step=done)
        report(rank, f"step {done}")

    def _validate(self, done: int) -> dict[str, float]:
        """Sync weights, measure `val/reward` and the like on the held-out rows if there are any, call callbacks."""
        if self.run.validation is None:
            return {}
        policies, name = self.controller.policies, self.run.follows
        follows = None if name is None else policies.get(name)
        if self.run.scores_validation and follows is not None:
            policies.bring(follows.name, done)
        metrics = measure(self.run, 0 if follows is None else follows.version_after(done), done, self._draws(done))
        if follows is not None and self.run.graph.policies() != (follows.name,):
            follows.sleep()  # else the next step generates with it first, and lets it sleep
        self.state.callback_metrics |= metrics
        self.callbacks.call(Callback.on_validation_end, done, metrics)
        return metrics


def _look_at_data(run: Run, console: Console) -> None:
    """Show a prompt as the policy reads it, and score gold answers; rank 0 does it for all."""
    if run.is_first:
        with console.phase("scoring gold answers"):
            for line in first_prompt(run):
                console.say(line)
            check_gold_answers(run)


def _leave_behind(folder: RunFolder, summary: dict[str, Any]) -> None:
    """Write `curves.png`, and print where the results are; rank 0 only."""
    try:
        draw_curves(folder.path)
    except UserError as error:  # the metrics were damaged during the run; the run itself is done
        print(f"warning: no {CURVES_FILE}: {error}")
    for line in closing_lines(folder, summary):
        print(line)


def _too_long(metrics: dict[str, float], max_seconds: float | None) -> bool:
    """Whether `trainer.max_seconds` are over; `time/elapsed` is the largest over all ranks, so all decide alike."""
    return max_seconds is not None and metrics["time/elapsed"] >= max_seconds
