"""From where a run goes on: a checkpoint that is found, looked at before anything is loaded, and read back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rlflow import checkpoint
from rlflow.callbacks.hooks import Callbacks
from rlflow.checkpoint import Progress
from rlflow.checkpoint.kept_rows import SURPLUS, UNDER_WAY, flight_name, read_kept
from rlflow.controller import Controller
from rlflow.errors import UserError
from rlflow.metrics import Metrics
from rlflow.module import chooses_prompts
from rlflow.run import random_states
from rlflow.run.all_ranks import gather
from rlflow.run.changed_settings import changed_settings
from rlflow.run.folder import from_here
from rlflow.run.module_state import restore_module
from rlflow.run.prepared_run import Prepared
from rlflow.run.setup import Joined


@dataclass(frozen=True)
class Resume:
    """Where a run begins.

    Attributes:
        joined: This rank.
        checkpoint: That the run goes on from; None for a new run.
        progress: Where that one stood; None likewise.
        lines: What the user should know of finding it.
    """

    joined: Joined
    checkpoint: Path | None
    progress: Progress | None
    lines: tuple[str, ...] = ()

    @classmethod
    def of(cls, joined: Joined) -> Resume:
        """What `trainer.ckpt_path` asks for, read once by the ranks together; called by all, before roles are loaded.

        Raises:
            UserError: The checkpoint that is named is not there, damaged, or of another run.
        """
        prepared, settings = joined.prepared, joined.prepared.settings
        if settings.ckpt_path is None:
            return cls(joined, None, None)
        lines: list[str] = []
        folder = checkpoint.find(
            settings.ckpt_path, settings.run_dir, partial(_damage, joined), lines.append, partial(_listed, joined)
        )
        if folder is None:
            return cls(joined, None, None, tuple(lines))
        progress = checkpoint.read_progress(folder, settings.seed, prepared.train.scan.digest)
        _require_same_choice(prepared, folder, progress)
        _require_flights(prepared, folder, progress.step)
        _require_parts(prepared, folder)
        if progress.config is not None and joined.config is not None:
            lines += changed_settings(progress.config, joined.config, folder.name)
        return cls(joined, folder, progress, tuple(lines))

    @property
    def done(self) -> int:
        """Steps that were done before this run."""
        return 0 if self.progress is None else self.progress.step

    @property
    def goes_on(self) -> bool:
        """Whether the run goes on in the folder that its checkpoint lies in."""
        folder = self.joined.prepared.settings.run_dir
        return self.checkpoint is not None and self.checkpoint.resolve().is_relative_to(folder.resolve())

    def restore(self, controller: Controller, metrics: Metrics, callbacks: Callbacks) -> list[str]:
        """Go on where the checkpoint was taken, if there is one; called by all ranks once their roles are loaded.

        Returns:
            What the user should know of it, a line each.
        """
        if self.checkpoint is None or self.progress is None:
            return [*self.lines]
        joined, prepared, folder, progress = self.joined, self.joined.prepared, self.checkpoint, self.progress
        device, transport = prepared.strategy.root_device, joined.transport
        checkpoint.restore(folder, prepared.strategy, prepared.stateful)
        restore_module(prepared.module, progress.module, checkpoint.read_module_tensors(folder))
        if prepared.train.chosen is not None:
            prepared.train.chosen.load_state_dict(progress.chosen or [])
        lines = callbacks.load_state_dict(progress.callbacks)
        controller.restore(
            self.done,
            progress.draws,
            lambda name, like: read_kept(folder, name, like, device),
        )
        controller.restore_history(progress.history)
        for logged in checkpoint.read_logged(folder, transport.rank, transport.world_size):
            metrics.log_again(logged.get("metrics", ()))
            joined.samples.keep_again(logged.get("samples", []))
            joined.context.memories.restore(logged.get("remembered", ()))
            if logged["random"]["of"] == [transport.rank, transport.world_size]:  # of other ranks' nobody goes on
                random_states.restore(logged["random"]["states"], device)
        return [*self.lines, *lines, f"continues {from_here(folder)} after step {self.done}"]


def _listed(joined: Joined, run_dir: Path) -> list[Path]:
    """The run's checkpoints as rank 0 sees them; a network file system may show others what was there before."""
    names = gather(joined.transport, [str(folder) for folder in checkpoint.newest_first(run_dir)])[0]
    return list(map(Path, names))


def _damage(joined: Joined, folder: Path) -> str | None:
    """What a checkpoint has in place of what was written, the same on all ranks: each file is read by one of them."""
    transport = joined.transport
    here = checkpoint.damage(folder, transport.rank, transport.world_size)
    return next((what for what in gather(transport, here) if what is not None), None)


def _require_same_choice(prepared: Prepared, folder: Path, progress: Progress) -> None:
    """Every rank looks before anything is loaded, so all end alike."""
    chose, chooses = progress.chosen is not None, chooses_prompts(prepared.module)
    if chose != chooses:
        raise UserError(
            f"{folder} was made by a module {'with' if chose else 'without'} `choose_prompts`, and this one has"
            f" {'one' if chooses else 'none'}, so the run would draw other prompts; continue with the same module,"
            " or start a new run from its model"
        )
    now, then = prepared.train.prompts_per_step, progress.prompts_per_step
    if chose and then not in (None, now):
        raise UserError(
            f"`data.prompts_per_step` is {now}, and the run of {folder} chose prompts for steps of {then}; continue"
            " with the same, or start a new run from its model"
        )


def _require_flights(prepared: Prepared, folder: Path, done: int) -> None:
    """Every rank looks before anything is loaded, so all end alike."""
    staleness = prepared.plan.max_staleness
    for step in range(done, min(done + staleness, prepared.steps)):
        if not (folder / f"{flight_name(step)}.json").is_file():
            raise UserError(
                f"{folder} has no rows of step {step + 1}, which is generated by then where"
                f" `trainer.max_staleness` is {staleness}: it was made with another, or at the end of its run;"
                " continue with the same, and a run that is done by a new one that starts from its model"
            )


def _require_parts(prepared: Prepared, folder: Path) -> None:
    """Every rank looks before anything is loaded, so all end alike."""
    planned = prepared.plan
    lost = {
        "responses under way": not planned.cuts_off and (folder / f"{UNDER_WAY}.json").is_file(),
        "groups that wait for the next step": planned.fill is None and (folder / f"{SURPLUS}.json").is_file(),
    }
    for what, is_lost in lost.items():
        if is_lost:
            raise UserError(
                f"{folder} has {what}, which would be lost, since `trainer.partial_rollout` is null or another"
                " algorithm is trained; continue with the algorithm that wrote it, and set that as it"
                " was, or to the longest response to let all end in one step"
            )
