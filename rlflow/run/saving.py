"""Saves checkpoints and models of a run; `checkpoint_of` lists what a checkpoint holds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from rlflow import checkpoint
from rlflow.callbacks.hooks import Callbacks
from rlflow.checkpoint import Checkpoint, Progress, RandomStates, Snapshot
from rlflow.controller import Controller
from rlflow.controller.run import Run
from rlflow.errors import UserError, did_you_mean
from rlflow.metrics import Metrics
from rlflow.module import handles
from rlflow.process import status
from rlflow.run.agreement import attempt
from rlflow.run.folder import RunFolder
from rlflow.run.recording import Recording
from rlflow.run.resume import Resume
from rlflow.settings import VALIDATION
from rlflow.storage.disk import Disk
from rlflow.storage.draft import Draft
from rlflow.storage.space import bytes_in, in_bytes, require_space
from rlflow.strategies.distributed import TIMEOUT_S

ELSEWHERE = "or give `trainer.run_dir` on another"
CONTINUE = "and continue with `--trainer.ckpt_path last`: what was saved before is still there"


class Saving:
    """One rank's part in checkpoints and models.

    Args:
        run: The run on this rank.
        folder: Folder of the run.
        resume: The checkpoint from which the run resumes, if any.

    Attributes:
        saved: Number of steps after which the last checkpoint in the run's folder was taken; None if there is none.
    """

    def __init__(self, run: Run, folder: RunFolder, resume: Resume) -> None:
        self._saved_at = 0.0  # seconds of this run at the last checkpoint
        self._run = run
        self._settings = run.settings
        self._strategy = run.strategy
        self._transport = run.transport
        self._folder = folder
        self._done = resume.done
        self._roles = run.graph.trained_roles()
        self._disk = Disk(self._settings.async_save)
        self._drafts: list[Draft] = []  # drafts that are being written
        self._nodes: dict[int, str] = {}  # name of each rank's machine
        self._model_bytes = self._state_bytes = 0  # bytes of the models and the states of all roles
        self._monitored: dict[str, float] = {}  # the metric that decides which checkpoints stay, by its name
        own = checkpoint.folder_of(folder.checkpoint.resolve(), resume.done)
        self.saved = resume.done if resume.checkpoint is not None and resume.checkpoint.resolve() == own else None
        status.saved(0)

    def is_due(self, done: int, elapsed: float, ends: bool) -> bool:
        """Whether a checkpoint is to be written; the same on all ranks.

        Args:
            done: Number of steps that are done.
            elapsed: Seconds of this run, the same on all ranks.
            ends: Whether the run ends with this step.
        """
        steps, seconds = self._settings.save_every_n_steps, self._settings.save_every_seconds
        if not self._settings.saves_checkpoints or self._settings.fast_dev_run:
            return False
        by_steps = steps is not None and done % steps == 0
        by_time = seconds is not None and elapsed - self._saved_at >= seconds
        if by_time:
            self._saved_at = elapsed
        return ends or by_steps or by_time

    def monitor(self, metrics: Mapping[str, float]) -> None:
        """Note the value of `trainer.monitor`, which decides which checkpoints stay, for the next checkpoint.

        Args:
            metrics: Metrics of the last step and the last validation.

        Raises:
            UserError: The run does not log the metric.
        """
        name = self._settings.monitor
        if name is None:
            self._monitored = {}
        elif name in metrics:
            self._monitored = {name: metrics[name]}
        elif name not in self._monitored and not self._may_come_later(name):
            raise UserError(
                f"`trainer.monitor` is {name!r}, which this run does not log.{did_you_mean(name, metrics)} Logged:"
                f" {', '.join(sorted(metrics))}"
            )

    def _may_come_later(self, name: str) -> bool:
        """Whether a run may log a metric only after its first steps: of a validation, role, or dataset of a mixture."""
        if name.startswith(VALIDATION):
            return self._done > 0
        role = handles(self._run.module).get(name.partition("/")[0])
        trains_later = role is not None and role.start_step > 0
        return trains_later or any(dataset in name.split("/") for dataset in self._run.train.masks([]))

    def state_dict(self) -> dict[str, float]:
        """The value of the metric that decides which checkpoints stay, by its name."""
        return self._monitored

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what `state_dict` returned."""
        self._monitored = state

    def save(self, snapshot: Snapshot, with_models: bool = True) -> None:
        """Write models and a checkpoint; called by all ranks.

        Args:
            snapshot: State of this rank from `Checkpoint.agreed`. Weights and optimizers have not changed since.
            with_models: Whether models are written too; a checkpoint alone has all that a run needs to resume.

        Raises:
            UserError: As `wait`.
        """
        self.wait()
        done = snapshot.progress.step
        draft = self._draft(self.folder_of(done))
        models = self._open(draft, with_models)
        while_running = self._settings.async_save
        if not while_running:  # before the states: gathering weights must not wait for their writing
            self._write_models(models, done)
        checkpoint.write_share(draft, self._disk, self._strategy, self._run.stateful, snapshot)
        if while_running:
            self._write_models(models, done, draft)
        self._complete_models(models, draft)
        checkpoint.leave(draft, self._disk)
        if draft.rank == 0:
            checkpoint.complete(draft, self._disk, self._run.stateful, snapshot.progress, self._retention)
            self._disk.do(partial(status.saved, done))
        self.saved = done
        self._disk.start()
        if not while_running:
            self.wait()

    def kept(self) -> dict[str, float | None]:
        """Folders of the run's checkpoints as rank 0 sees them, oldest first, and the value of `monitor` of each."""
        found = reversed(checkpoint.newest_first(self._folder.path)) if self._transport.rank == 0 else ()
        here = checkpoint.monitored_values(found, self._settings.monitor)
        named = {str(each): value for each, value in here.items()}
        values: dict[str, float | None] = self._transport.gather_json(named)[0]
        return values

    def folder_of(self, done: int) -> Path:
        """The folder of the checkpoint after `done` steps."""
        return checkpoint.folder_of(self._folder.checkpoint, done)

    def save_models(self) -> None:
        """Write every trained role in Hugging Face form, as it is now; called by all ranks.

        Raises:
            UserError: As `wait`.
        """
        models = self._open()
        self._write_models(models)
        self._complete_models(models)
        self.wait()

    def wait(self) -> None:
        """Wait until all drafts are written; called by all ranks.

        Raises:
            UserError: A rank could not write its files, or found infinite or NaN numbers in them. Earlier checkpoints
                and models are still there.
        """
        if not self._drafts:
            return
        drafts, self._drafts = self._drafts, []
        try:
            self._attempt(self._disk.wait)
        except BaseException:
            if self._transport.rank == 0:
                for draft in drafts:
                    draft.discard()
            raise

    def abandon(self) -> None:
        """Like `wait`, on this rank alone, for a run that ends by an error; errors of writing are not reported then."""
        if self._drafts and self._settings.async_save:
            with contextlib.suppress(Exception):
                self._disk.give_up()

    def require_space(self) -> None:
        """Check before the first step that the disk has room for the run's saves; called by all, with roles loaded.

        Raises:
            UserError: There is too little room, or a checkpoint cannot store the states of an optimizer.
        """
        settings, folder = self._settings, self._folder
        if settings.fast_dev_run:
            return
        every = settings.save_every_n_steps if settings.save_every_seconds is None else 1
        self._measure()
        saves = 0 if every is None else -(-(self._run.steps - self._done) // every)
        # A new model or checkpoint is written before an old one is removed.
        models, checkpoints = min(2, max(1, saves)), self._retention.most(saves)
        what = f"{models} x {in_bytes(self._model_bytes)} of models"
        if checkpoints:
            what += f" and {checkpoints} x {in_bytes(self._state_bytes)} of checkpoints"

        def look() -> None:
            if self._transport.rank == 0:
                there = sum(map(bytes_in, [folder.checkpoint, *(self._target(role) for role in self._roles)]))
                needed = models * self._model_bytes + checkpoints * self._state_bytes - there
                require_space(folder.path, needed, f"this run saves up to {what}, which needs", ELSEWHERE)

        self._attempt(look)

    @property
    def _retention(self) -> checkpoint.Retention:
        of = self._settings
        return checkpoint.Retention(of.save_last, of.save_top_k, of.monitor, of.mode)

    def _draft(self, target: Path) -> Draft:
        timeout = self._strategy.timeout
        timeout_s = TIMEOUT_S if timeout is None else timeout.total_seconds()
        return Draft(target, self._transport.rank, self._nodes, timeout_s)

    def _target(self, role: str) -> Path:
        return self._folder.model if role == self._run.lead else self._folder.model_of(role)

    def _measure(self) -> None:
        """Measure the bytes of all models, and of all states in a checkpoint; each role's first rank measures it."""
        here = [0, 0]

        def measure() -> None:
            for role in filter(self._strategy.leads, self._run.stateful):
                here[0] += self._strategy.model_bytes(role) if role in self._roles else 0
                here[1] += self._strategy.state_bytes(role) if self._settings.saves_checkpoints else 0

        self._attempt(measure)
        self._model_bytes, self._state_bytes = map(sum, zip(*self._transport.gather_json(here), strict=True))

    def _open(self, draft: Draft | None = None, with_models: bool = True) -> dict[str, Draft]:
        """Open the drafts of all roles' models and of the checkpoint, if any; refuse if the disk lacks room."""
        models = {role: self._draft(self._target(role)) for role in self._roles if with_models}
        drafts = [*models.values(), *([] if draft is None else [draft])]

        def open_all() -> None:
            if self._transport.rank == 0:
                needed = bool(models) * self._model_bytes + (draft is not None) * self._state_bytes
                what = " and the ".join(["models"] * bool(models) + ["checkpoint"] * (draft is not None))
                require_space(self._folder.path, needed, f"the {what} of this run need", CONTINUE)
                self._folder.summary.unlink(missing_ok=True)  # of an earlier end: the run is in progress again
                for each in drafts:
                    each.open()

        self._attempt(open_all)
        self._drafts = drafts
        return models

    def _write_models(self, models: dict[str, Draft], done: int | None = None, state: Draft | None = None) -> None:
        """Let the disk write this rank's shares of the models.

        Args:
            models: Drafts of the models, by role.
            done: Number of steps that are done; None at the end of the run.
            state: Draft of a checkpoint of this step, from which weights are read; None to gather weights.
        """
        for role, draft in models.items():
            if self._strategy.holds(role):
                ranks = self._strategy.layout(role).ranks
                read = None if state is None else partial(checkpoint.written_state, state, role, ranks)
                what = draft.target.name if done is None else f"{draft.target.name} after step {done}"
                written = self._strategy.save(role, draft.path, self._disk, read, what)
                if self._strategy.leads(role):
                    self._disk.do(partial(self._run.tokenizer.save_pretrained, draft.path))
                self._disk.report(partial(draft.report, written=written))

    def _complete_models(self, models: dict[str, Draft], state: Draft | None = None) -> None:
        """Let the disk rename the drafts of models when all ranks have written them, and the checkpoint too, if any."""

        def collect(draft: Draft, ranks: tuple[int, ...]) -> None:
            draft.collect(ranks)
            if state is not None:  # if another role cannot be written, this role's earlier model stays as well
                state.collect(state.nodes)

        for role, draft in models.items():
            if self._strategy.leads(role):
                ready = partial(collect, draft, self._strategy.layout(role).ranks)
                self._disk.do(ready)
                self._disk.do(draft.complete)

    def _attempt(self, action: Callable[[], None]) -> None:
        """See `attempt`."""
        self._nodes |= attempt(self._transport, self._folder.path, action)


def checkpoint_of(
    run: Run, controller: Controller, callbacks: Callbacks, recording: Recording, saving: Saving, metrics: Metrics
) -> Checkpoint:
    """The parts of a run whose states are in its checkpoints, by name, on this rank; called after loading roles."""
    chosen = {} if run.train.chosen is None else {"chosen": run.train.chosen}  # rows of epochs that the module chose
    return Checkpoint(
        strategy=run.strategy,
        roles=run.stateful,
        module=run.module,
        changed={**chosen, "updates": controller.updates},  # gradient norms; later norms are compared with them
        alike={
            "steps": controller,  # numbers of steps and draws that are done
            "gaps": controller.policies,  # logprob gaps; gaps of later steps are compared with them
            "callbacks": callbacks,
            "validation": recording,  # metrics before the first step, for the summary
            "monitored": saving,  # the metric that decides which checkpoints stay
        },
        of_rank={
            "metrics": metrics,  # metrics of steps in progress
            "samples": run.samples,  # samples of steps in progress, for the loggers
            "remembered": run.context.memories,  # what steps in progress gave to memories of prompts
            # rlflow itself draws by (seed, step, draw); code of the user may draw from these generators.
            "random": RandomStates(run.strategy.root_device),
        },
        carried_over=controller.carried_over,
        take_over=controller.take_over,
        start=Progress(0, run.settings.seed, run.train.scan.digest, run.config),
        gather=run.transport.gather_json,
    )
