"""What a run writes to go on from, and going on from it."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow import checkpoint
from rlflow.checkpoint import Progress
from rlflow.checkpoint.kept_rows import SURPLUS, UNDER_WAY, flight_name, read_kept
from rlflow.controller import Controller
from rlflow.dag.tasks import Load
from rlflow.databuffer.message import from_message, to_message
from rlflow.databuffer.transport import Transport
from rlflow.errors import UserError
from rlflow.metrics import Metrics
from rlflow.models.causal_lm import Averaged
from rlflow.module import RLModule, chooses_prompts, handles
from rlflow.run.folder import RunFolder
from rlflow.run.module_state import ModuleState
from rlflow.run.prepare import Prepared
from rlflow.run.samples import Samples
from rlflow.storage.disk import Disk
from rlflow.storage.draft import Draft, Record, not_written
from rlflow.storage.space import bytes_in, in_bytes, require_space
from rlflow.strategies.strategy import TrainingStrategy

DEFAULT_TIMEOUT_S = 600.0  # of a strategy without one
ELSEWHERE = "or give `trainer.run_dir` on another"
CONTINUE = "and continue with `--trainer.ckpt_path last`: what was saved before is still there"

if TYPE_CHECKING:
    from rlflow.trainer import Trainer


class Saving:
    """One rank's part in checkpoints and models.

    Args:
        trainer: The settings.
        module: The algorithm.
        prepared: The run as planned.
        strategy: Holds the roles.
        transport: To the other ranks.
        metrics: What was logged of steps under way is saved with them.
        samples: Likewise.

    Attributes:
        resumed: The checkpoint that the run goes on from; None for a new run.
        progress: Where that one stood.
        before: Validation before the first step of all.

    Raises:
        UserError: The checkpoint that is named is not there, or of another run.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: RLModule,
        prepared: Prepared,
        strategy: TrainingStrategy,
        transport: Transport,
        metrics: Metrics,
        samples: Samples,
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._prepared = prepared
        self._strategy = strategy
        self._transport = transport
        self._metrics = metrics
        self._samples = samples
        self._roles = prepared.graph.trained_roles()
        averages = [name for name in prepared.paths if isinstance(handles(module)[name], Averaged)]
        self._stateful = (*self._roles, *averages)  # those that a checkpoint has a state of, averages after the rest
        self._disk = Disk(trainer.async_save)
        self._pending = False  # whether something was begun that `wait` waits for
        self._nodes: dict[int, str] = {}  # of each rank
        self._sizes: dict[str, tuple[int, int]] = {}  # of each role's model and state
        self.resumed: Path | None = None
        self.progress: Progress | None = None
        if trainer.ckpt_path is not None:
            self.resumed = checkpoint.find(trainer.ckpt_path, trainer.run_dir)
            self.progress = checkpoint.read_progress(self.resumed, trainer.seed, prepared.train.scan.digest)
            self._require_same_choice(self.resumed, self.progress)
            self._require_flights(self.resumed, self.progress.step)
            self._require_parts(self.resumed)
        self.before: dict[str, float] = {} if self.progress is None else self.progress.before
        self._state = ModuleState(module, transport.rank, self._gather)

    @property
    def done(self) -> int:
        """Steps that were done before this run."""
        return 0 if self.progress is None else self.progress.step

    def require_unchanged(self) -> None:
        """Read the checkpoint that the run goes on from, each file on one rank; called by all, before roles are loaded.

        Raises:
            UserError: A file is not what was written.
        """
        if self.resumed is None:
            return
        resumed, here = self.resumed, list[str]()
        rank, world_size = self._transport.rank, self._transport.world_size
        self._attempt(lambda: here.extend(checkpoint.changed_files(resumed, rank, world_size)))
        changed = sorted(name for names in self._gather(here) for name in names)
        if changed:
            raise UserError(
                f"{self.resumed / changed[0]} is not what was written: its SHA-256 differs from that in"
                f" {checkpoint.STATE}; give `trainer.ckpt_path` another checkpoint's folder"
            )

    def restore(self, controller: Controller) -> None:
        """Go on where the checkpoint was taken, if there is one; called by all ranks once their roles are loaded."""
        if self.resumed is not None and self.progress is not None:
            folder, device = self.resumed, self._strategy.root_device
            checkpoint.restore(folder, self._strategy, self._stateful)
            tensors = checkpoint.read_module_tensors(folder)
            self._state.restore(self.progress.module, tensors)
            if self._prepared.train.chosen is not None:
                self._prepared.train.chosen.load_state_dict(self.progress.chosen or [])
            for callback, state in zip(self._trainer.callbacks, self.progress.callbacks, strict=True):
                callback.load_state_dict(state)
            controller.restore(self.done, self.progress.draws, lambda name, like: read_kept(folder, name, like, device))
            for logged in checkpoint.read_logged(folder, self._transport.rank, self._transport.world_size):
                self._metrics.log_again(logged.get("metrics", ()))
                self._samples.keep_again(logged.get("samples", []))
                controller.context.remember_again(logged.get("remembered", ()))
        self._state.begin()

    def save_if_due(self, done: int, folder: RunFolder, controller: Controller) -> None:
        """Write models and a checkpoint after `done` steps, if they are to be written then; called by all ranks.

        Raises:
            UserError: A weight, or what the optimizer keeps of it, is not finite; nothing was written.
        """
        every = self._trainer.save_every_n_steps
        ends = self._trainer.should_stop or done == self._prepared.steps
        if every is None or self._trainer.fast_dev_run or (done % every and not ends):
            return
        self.wait()
        self._require_finite(done, states=True)
        module, tensors = self._state.taken()
        progress = Progress(
            step=done,
            version=controller.version_after(done),
            seed=self._trainer.seed,
            data=self._prepared.train.scan.digest,
            draws=controller.draws,
            before=self.before,
            module=module,
            callbacks=[callback.state_dict() for callback in self._trainer.callbacks],
            chosen=self._chosen_rows(),
            prompts_per_step=self._prepared.train.prompts_per_step,
        )
        later = self._metrics.of_later_steps(done - 1)
        logged = {"metrics": later, "samples": self._samples.of_later_steps()} if later else {}
        if remembered := controller.context.of_later_steps(done - 1):
            logged |= {"remembered": remembered}
        draft = checkpoint.draft_of(folder.checkpoint, done)
        models = self._open(folder, draft)
        self._write_models(models)
        kept, rank = controller.kept(done), self._transport.rank
        checkpoint.write_share(
            draft, self._disk, self._strategy, self._stateful, self._nodes, rank, kept, logged, tensors
        )
        self._complete_models(models)
        if rank == 0:
            keep, timeout_s = self._trainer.keep_checkpoints, self._timeout_s
            checkpoint.complete(draft, self._disk, self._stateful, progress, self._nodes, timeout_s, keep)
        if not self._trainer.async_save:
            self.wait()

    def save_models(self, folder: RunFolder, done: int) -> None:
        """Write every trained role in Hugging Face form, as it is after `done` steps; called by all ranks.

        Raises:
            UserError: A weight is not finite; nothing was written.
        """
        self._require_finite(done, states=False)
        models = self._open(folder)
        self._write_models(models)
        self._complete_models(models)
        self.wait()

    def wait(self) -> None:
        """Return when all that was begun is written; called by all ranks.

        Raises:
            UserError: A rank could not write it; what was written before is still there.
        """
        if not self._pending:
            return
        self._pending = False
        self._attempt(self._disk.wait)

    def abandon(self) -> None:
        """As `wait` where the run ends by an error, which is the one to be reported; on this rank alone."""
        if self._pending and self._trainer.async_save:
            with contextlib.suppress(Exception):
                self._disk.wait()

    def require_space(self, folder: RunFolder) -> None:
        """Look before the first step whether what the run is to save has room; called by all ranks, with roles loaded.

        Raises:
            UserError: It has not, or a checkpoint cannot hold what an optimizer keeps.
        """
        trainer, every = self._trainer, self._trainer.save_every_n_steps
        if trainer.fast_dev_run:
            return

        self._sizes = self._sizes_of_roles()
        model, state = (sum(size) for size in zip(*self._sizes.values(), strict=True))
        saves = 0 if every is None else -(-(self._prepared.steps - self.done) // every)
        # A new one is written before an old one is removed.
        models, checkpoints = min(2, max(1, saves)), min(trainer.keep_checkpoints + 1, saves)
        what = f"{models} x {in_bytes(model)} of models"
        if checkpoints:
            what += f" and {checkpoints} x {in_bytes(state)} of checkpoints at once"

        def look() -> None:
            if self._transport.rank == 0:
                there = sum(map(bytes_in, [folder.checkpoint, *(self._target(folder, role) for role in self._roles)]))
                needed = models * model + checkpoints * state - there
                require_space(folder.path, needed, f"this run saves up to {what}, which needs", ELSEWHERE)

        self._attempt(look)

    @property
    def _timeout_s(self) -> float:
        timeout = self._strategy.timeout
        return DEFAULT_TIMEOUT_S if timeout is None else timeout.total_seconds()

    def _target(self, folder: RunFolder, role: str) -> Path:
        return folder.model if role == self._prepared.lead else folder.model_of(role)

    def _sizes_of_roles(self) -> dict[str, tuple[int, int]]:
        """Bytes of each role's model and of its state in a checkpoint, which its first rank tells."""
        led = [role for role in self._stateful if self._strategy.leads(role)]
        sizes: dict[str, tuple[int, int]] = {}
        with_states = self._trainer.save_every_n_steps is not None

        def measure() -> None:
            for role in led:
                state = self._strategy.state_bytes(role) if with_states else 0
                sizes[role] = self._strategy.model_bytes(role) if role in self._roles else 0, state

        self._attempt(measure)
        return {role: size for here in self._gather(sizes) for role, size in here.items()}

    def _open(self, folder: RunFolder, draft: Draft | None = None) -> dict[str, Draft]:
        """Begin to write, if there is room: the models of all roles, and the checkpoint if there is one."""
        models = {role: Draft(self._target(folder, role)) for role in self._roles}

        def open_all() -> None:
            if self._transport.rank == 0:
                needed = sum(model + (0 if draft is None else state) for model, state in self._sizes.values())
                what = f"the {'models' if draft is None else 'models and the checkpoint'} of this run need"
                require_space(folder.path, needed, what, CONTINUE)
                for each in [*models.values(), *([] if draft is None else [draft])]:
                    each.open()

        self._attempt(open_all)
        self._pending = True
        return models

    def _write_models(self, models: dict[str, Draft]) -> None:
        """Let the disk write this rank's shares of them."""
        rank, nodes = self._transport.rank, self._nodes

        def record(draft: Draft, written: tuple[Path, ...], error: BaseException | None) -> None:
            if error is not None:
                for path in written:  # its room is needed to say so
                    path.unlink(missing_ok=True)
            why = None if error is None else not_written(error, draft.target, rank, nodes[rank])
            draft.add(Record(rank, error=why))

        for role, draft in models.items():
            if self._strategy.holds(role):
                written = self._strategy.save(role, draft.path, self._disk)
                if self._strategy.leads(role):
                    self._disk.do(partial(self._prepared.tokenizer.save_pretrained, draft.path))
                self._disk.report(partial(record, draft, written))

    def _complete_models(self, models: dict[str, Draft]) -> None:
        """Let the disk give them their names when all ranks' shares are there."""

        def complete(draft: Draft, ranks: tuple[int, ...], _: BaseException | None) -> None:
            try:
                draft.collect(ranks, self._nodes, self._timeout_s)
                draft.complete()
            except BaseException:
                draft.discard()
                raise

        for role, draft in models.items():
            if self._strategy.leads(role):
                self._disk.report(partial(complete, draft, self._strategy.layout(role).ranks))

    def _attempt(self, action: Callable[[], None]) -> None:
        """Do it on this rank; ranks learn from one another whether they could, so all end alike.

        Raises:
            UserError: One could not.
        """
        rank, node, failed, why = self._transport.rank, socket.gethostname(), None, None
        try:
            action()
        except Exception as error:
            failed, why = error, not_written(error, self._trainer.run_dir, rank, node)
        ranks = self._gather({"node": node, "why": why})
        self._nodes = {number: of["node"] for number, of in enumerate(ranks)}
        if failed is not None and not isinstance(failed, UserError | OSError):
            raise failed
        for of in ranks:
            if of["why"] is not None:
                raise UserError(of["why"]) from failed

    def _gather(self, here: Any) -> list[Any]:
        """What is JSON-able, of every rank."""
        messages = self._transport.all_gather_ragged(to_message(json.dumps(here).encode()))
        return [json.loads(from_message(message)) for message in messages]

    def _require_finite(self, done: int, states: bool) -> None:
        """Look before anything is written; ranks learn from one another what they found, so all end alike.

        Args:
            done: Steps, for the message.
            states: Whether what a checkpoint holds is looked at too.
        """
        here = {
            role: self._strategy.first_not_finite(role, states) for role in self._roles if self._strategy.holds(role)
        }
        for of_rank in self._gather(here):
            for role, found in of_rank.items():
                if found is not None:
                    name, kind = found
                    raise UserError(_not_finite(role, name, kind, done))

    def _chosen_rows(self) -> list[dict[str, Any]] | None:
        """Of epochs, as the first rank that loads prompts has them; None where the module does not choose."""
        chosen = self._prepared.train.chosen
        if chosen is None:
            return None
        loads = next(task.ranks[0] for task in self._prepared.plan.every() if isinstance(task, Load))
        of_ranks = self._gather(chosen.state_dict() if self._transport.rank == loads else None)
        rows: list[dict[str, Any]] = of_ranks[loads]
        return rows

    def _require_same_choice(self, folder: Path, progress: Progress) -> None:
        """Every rank looks before anything is loaded, so all end alike."""
        chose, chooses = progress.chosen is not None, chooses_prompts(self._module)
        if chose != chooses:
            raise UserError(
                f"{folder} was made by a module {'with' if chose else 'without'} `choose_prompts`, and this one has"
                f" {'one' if chooses else 'none'}, so the run would draw other prompts; continue with the same module,"
                " or start a new run from its model"
            )
        now, then = self._prepared.train.prompts_per_step, progress.prompts_per_step
        if chose and then not in (None, now):
            raise UserError(
                f"`data.prompts_per_step` is {now}, and the run of {folder} chose prompts for steps of {then}; continue"
                " with the same, or start a new run from its model"
            )

    def _require_flights(self, folder: Path, done: int) -> None:
        """Every rank looks before anything is loaded, so all end alike."""
        staleness = self._prepared.plan.max_staleness
        for step in range(done, min(done + staleness, self._prepared.steps)):
            if not (folder / f"{flight_name(step)}.json").is_file():
                raise UserError(
                    f"{folder} has no rows of step {step + 1}, which is generated by then where"
                    f" `trainer.max_staleness` is {staleness}: it was made with another, or at the end of its run;"
                    " continue with the same, and a run that is done by a new one that starts from its model"
                )

    def _require_parts(self, folder: Path) -> None:
        """Every rank looks before anything is loaded, so all end alike."""
        planned = self._prepared.plan
        lost = {
            "responses under way": not planned.cuts_off and (folder / f"{UNDER_WAY}.json").is_file(),
            "groups that wait for the next step": planned.fill is None and (folder / f"{SURPLUS}.json").is_file(),
        }
        for what, is_lost in lost.items():
            if is_lost:
                raise UserError(
                    f"{folder} has {what}, which would be lost, since `trainer.partial_rollout` is null or another"
                    " algorithm is trained; continue with the algorithm that wrote it, and set `partial_rollout` as it"
                    " was, or to the longest response to let all end in one step"
                )


def _not_finite(role: str, name: str, kind: str, step: int) -> str:
    """What a user reads of tensors that are not saved."""
    weights = f"the weights of `{role}`"
    what = f"{weights} are" if kind == "weight" else f"{kind!r}, which the optimizer keeps of {weights}, is"
    return (
        f"{what} infinite or NaN after step {step}, of {name!r} first, so nothing was saved; what was saved before is"
        " still there. Lower the learning rate, or look for NaN in rewards and loss"
    )
