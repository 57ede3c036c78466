"""What a run writes to go on from, and going on from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow import checkpoint
from rlflow.checkpoint import Progress
from rlflow.controller import Controller
from rlflow.data.message import from_message, to_message
from rlflow.data.surplus import SURPLUS, UNDER_WAY, flight_name, read_kept
from rlflow.data.transport import Transport
from rlflow.errors import UserError
from rlflow.metrics import Metrics
from rlflow.module import RLModule
from rlflow.preparation import Prepared
from rlflow.run_folder import RunFolder
from rlflow.samples import Samples
from rlflow.strategies.strategy import TrainingStrategy

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
        self.resumed: Path | None = None
        self.progress: Progress | None = None
        if trainer.ckpt_path is not None:
            self.resumed = checkpoint.find(trainer.ckpt_path, trainer.run_dir)
            self.progress = checkpoint.read_progress(self.resumed, trainer.seed, prepared.train.scan.digest)
            self._require_flights(self.resumed, self.progress.step)
            self._require_parts(self.resumed)
        self.before: dict[str, float] = {} if self.progress is None else self.progress.before
        self._module_before: dict[str, Any] = {}

    @property
    def done(self) -> int:
        """Steps that were done before this run."""
        return 0 if self.progress is None else self.progress.step

    def restore(self, controller: Controller) -> None:
        """Go on where the checkpoint was taken, if there is one; called by all ranks once their roles are loaded."""
        if self.resumed is not None and self.progress is not None:
            folder, device = self.resumed, self._strategy.root_device
            checkpoint.restore(folder, self._strategy, self._roles)
            self._module.load_state_dict(self.progress.module)
            for callback, state in zip(self._trainer.callbacks, self.progress.callbacks, strict=True):
                callback.load_state_dict(state)
            controller.restore(self.done, self.progress.draws, lambda name, like: read_kept(folder, name, like, device))
            for logged in checkpoint.read_logged(folder, self._transport.rank, self._transport.world_size):
                self._metrics.log_again(logged["metrics"])
                self._samples.keep_again(logged["samples"])
        self._module_before = _as_json(self._module.state_dict())

    def save_if_due(self, done: int, folder: RunFolder, controller: Controller) -> None:
        """Write models and a checkpoint after `done` steps, if they are to be written then; called by all ranks.

        Raises:
            UserError: A weight, or what the optimizer keeps of it, is not finite; nothing was written.
        """
        every = self._trainer.save_every_n_steps
        ends = self._trainer.should_stop or done == self._prepared.steps
        if every is None or self._trainer.fast_dev_run or (done % every and not ends):
            return
        self._require_finite(done, states=True)
        self._write_models(folder)
        progress = Progress(
            step=done,
            version=controller.version_after(done),
            seed=self._trainer.seed,
            data=self._prepared.train.scan.digest,
            draws=controller.draws,
            before=self.before,
            module=self._module_state(),
            callbacks=[callback.state_dict() for callback in self._trainer.callbacks],
        )
        later = self._metrics.of_later_steps(done - 1)
        logged = {"metrics": later, "samples": self._samples.of_later_steps()} if later else None
        rank, world_size = self._transport.rank, self._transport.world_size
        kept = controller.kept(done)
        keep = self._trainer.keep_checkpoints
        checkpoint.write(folder.checkpoint, self._strategy, self._roles, progress, rank, world_size, kept, logged, keep)

    def save_models(self, folder: RunFolder, done: int) -> None:
        """Write every trained role in Hugging Face form, as it is after `done` steps; called by all ranks.

        Raises:
            UserError: A weight is not finite; nothing was written.
        """
        self._require_finite(done, states=False)
        self._write_models(folder)

    def _write_models(self, folder: RunFolder) -> None:
        for role in self._roles:
            target = folder.model if role == self._prepared.lead else folder.model_of(role)
            if self._strategy.holds(role):
                self._strategy.save(role, target)
            if self._strategy.leads(role):
                self._prepared.tokenizer.save_pretrained(target)

    def _require_finite(self, done: int, states: bool) -> None:
        """Look before anything is written; ranks learn from one another what they found, so all end alike.

        Args:
            done: Steps, for the message.
            states: Whether what a checkpoint holds is looked at too.
        """
        here = {
            role: self._strategy.first_not_finite(role, states) for role in self._roles if self._strategy.holds(role)
        }
        for message in self._transport.all_gather_ragged(to_message(json.dumps(here).encode())):
            for role, found in json.loads(from_message(message)).items():
                if found is not None:
                    name, kind = found
                    raise UserError(_not_finite(role, name, kind, done))

    def _module_state(self) -> dict[str, Any]:
        """Each entry as the ranks have it that changed it: those that run the node that it belongs to."""
        here = json.dumps(self._module.state_dict()).encode()
        gathered = self._transport.all_gather_ragged(to_message(here))
        states: list[dict[str, Any]] = [json.loads(from_message(each)) for each in gathered]
        names = dict.fromkeys(name for state in states for name in state)
        of_ranks = {name: [state[name] for state in states if name in state] for name in names}
        before = self._module_before
        return {
            name: next((value for value in values if value != before.get(name)), values[0])
            for name, values in of_ranks.items()
        }

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


def _as_json(state: dict[str, Any]) -> dict[str, Any]:
    """A copy, as a checkpoint gives it back."""
    copied: dict[str, Any] = json.loads(json.dumps(state))
    return copied
