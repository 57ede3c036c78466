"""The checkpoint from which a run resumes: finding it, checking it before anything is loaded, and reading it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import isnan
from pathlib import Path
from typing import Any

from rlflow import checkpoint
from rlflow.checkpoint import Checkpoint, Progress
from rlflow.checkpoint.stored_groups import SURPLUS, UNFINISHED, step_name
from rlflow.controller.run import Run
from rlflow.data.mixture import MixedDataset
from rlflow.errors import UserError
from rlflow.module import chooses_prompts
from rlflow.run.folder import from_here

# Sections and settings that change no number, or only how sums are rounded.
WITHOUT_EFFECT = {"data.validation", "logger", "callbacks", "placement", "predict"}
WITHOUT_EFFECT |= {"strategy.init_args.timeout_s"}
WAITING = {UNFINISHED: "unfinished responses", SURPLUS: "groups that wait for the next step"}
# The rows of `data.train` are compared by their digest, which settings of a mixture's datasets are not part of.
ROWS = re.compile(r"data\.train\b(?!.*\.(weight|sampling|max_response_length)\b)")
TRAINER, LENGTHS = "trainer.", {"trainer.max_steps", "trainer.max_epochs"}
# The settings of the trainer that change numbers; lengths do if a learning rate's schedule ends with the run.
WITH_EFFECT = {
    *LENGTHS,
    "trainer.max_staleness",
    "trainer.partial_rollout",
    "trainer.grad_norm_spike_limit",
    "trainer.precision",
}
SCHEDULE = ".schedule"
LONGEST = 60  # most characters of a value that are shown


@dataclass(frozen=True)
class Resume:
    """The checkpoint from which a run resumes, if any.

    Attributes:
        checkpoint: Folder of the checkpoint; None for a new run.
        progress: Progress of the run at the checkpoint; None for a new run.
        goes_on: Whether the run continues in the run folder that has the checkpoint.
        lines: Lines for the user about the search for the checkpoint.
    """

    checkpoint: Path | None = None
    progress: Progress | None = None
    goes_on: bool = False
    lines: tuple[str, ...] = ()

    @classmethod
    def of(cls, run: Run) -> Resume:
        """Find the checkpoint of `trainer.ckpt_path`; called by all ranks before roles are loaded.

        To check the checkpoint, the ranks divide its files among them, so each file is read once.

        Raises:
            UserError: The checkpoint does not exist, is damaged, or belongs to another run.
        """
        settings = run.settings
        if settings.ckpt_path is None:
            return cls()
        lines: list[str] = []
        folder = checkpoint.find(
            settings.ckpt_path, settings.folder, partial(_damage, run), lines.append, partial(_listed, run)
        )
        if folder is None:
            return cls(lines=tuple(lines))
        progress = checkpoint.read_progress(folder, settings.seed, run.train.scan.digest)
        _require_same(run, folder, progress)
        if progress.config is not None and run.config is not None:
            lines += changed_settings(progress.config, run.config, folder.name)
        return cls(folder, progress, folder.resolve().is_relative_to(settings.folder.resolve()), tuple(lines))

    @property
    def done(self) -> int:
        """Number of steps that were done before this run."""
        return 0 if self.progress is None else self.progress.step

    def restore(self, parts: Checkpoint) -> list[str]:
        """Restore the parts of the run from the checkpoint, if there is one; called by all ranks after loading roles.

        Returns:
            Lines for the user.
        """
        if self.checkpoint is None or self.progress is None:
            return [*self.lines]
        lines = parts.restore(self.checkpoint, self.progress)
        return [*self.lines, *lines, f"continues {from_here(self.checkpoint)} after step {self.done}"]


def _listed(run: Run, run_dir: Path) -> list[Path]:
    """The run's checkpoints as rank 0 sees them, newest or best first.

    On a network file system other ranks may see an older state.
    """
    found = checkpoint.newest_first(run_dir)
    if run.settings.ckpt_path == checkpoint.BEST:
        monitor, sign = run.settings.monitor, 1 if run.settings.mode == "min" else -1
        values = checkpoint.monitored_values(found, monitor)
        measured = {each: sign * value for each, value in values.items() if value is not None and not isnan(value)}
        found = sorted(measured, key=lambda each: measured[each])
    return [Path(name) for name in run.transport.gather_json([str(folder) for folder in found])[0]]


def _damage(run: Run, folder: Path) -> str | None:
    """Damage of a checkpoint, the same on all ranks; None if there is none. Each file is read by one rank."""
    transport = run.transport
    here = checkpoint.damage(folder, transport.rank, transport.world_size)
    return next((what for what in transport.gather_json(here) if what is not None), None)


def _require_same(run: Run, folder: Path, progress: Progress) -> None:
    """Refuse a checkpoint from which this run cannot resume. Every rank checks, before anything is loaded.

    Raises:
        UserError: This run cannot resume from it.
    """
    chosen, chooses = progress.state.get("chosen"), chooses_prompts(run.module) is not None
    if (chosen is not None) != chooses:
        raise UserError(
            f"{folder} was made {'without' if chooses else 'with'} `choose_prompts` or `data.curriculum`, and this run"
            f" has {'one' if chooses else 'none'}, so it would draw other prompts; continue with the same, or start a"
            " new run from its model"
        )
    now = run.data.prompts_per_step
    if chosen is not None and chosen["per_draw"] != now:
        raise UserError(
            f"`data.prompts_per_step` is {now}, and the run of {folder} chose prompts for steps of"
            f" {chosen['per_draw']}; continue with the same, or start a new run from its model"
        )
    staleness, done = run.plan.max_staleness, progress.step
    ahead = range(done, min(done + staleness, run.steps))
    waiting = ["rows of later steps"] if ahead else []
    for step in ahead:
        if not (folder / f"{step_name(step)}.json").is_file():
            raise UserError(
                f"{folder} has no rows of step {step + 1}, which a run with `trainer.max_staleness` {staleness} has"
                " generated by then: it was saved with another value, or at the end of its run; continue with the same"
                " value, or start a new run from the model of a finished run"
            )
    beyond = done + staleness
    if beyond < run.steps and (folder / f"{step_name(beyond)}.json").is_file():
        raise UserError(
            f"{folder} has rows of step {beyond + 1}, which would be generated and counted once more, since"
            f" `trainer.max_staleness` is {staleness} and was more; continue with the same, or start a new run from its"
            " model"
        )
    is_lost = {UNFINISHED: not run.plan.cuts_off, SURPLUS: run.plan.dynamic_sampling is None}
    before = progress.state["steps"].get("prompts_per_step", now)
    for name, what in WAITING.items():
        if not (folder / f"{name}.json").is_file():
            continue
        if is_lost[name]:
            raise UserError(
                f"{folder} has {what}, which would be lost, since `trainer.partial_rollout` is null or another"
                " algorithm is trained; continue with the same algorithm and the same `partial_rollout`, or set that to"
                " the longest response, so that all responses end in one step"
            )
        waiting.append(what)
    if waiting and before != now:
        raise UserError(
            f"`data.prompts_per_step` is {now}, and {folder} has {waiting[0]} of draws of {before} prompts, whose ids"
            " other prompts would get; continue with the same, or start a new run from its model"
        )


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any], where: str) -> list[str]:
    """A line for each changed setting that changes the numbers of later steps; for another class, only the class.

    Args:
        before: Resolved config with which a checkpoint was written.
        now: Resolved config of the run that resumes from it.
        where: Name of the checkpoint, for the lines.
    """
    followed = any(
        key.endswith(SCHEDULE) and value not in (None, "constant")
        for config in (before, now)
        for key, value in _leaves(config)
    )
    return [
        f"`{key}` is {_shown(new)} and was {_shown(old)} when {where} was written: the steps from here on have other"
        " numbers"
        for key, old, new in _differences(before, now, "")
        if not ROWS.match(key) and (key not in LENGTHS or followed)
    ]


def _differences(before: Any, now: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    if before == now or key in WITHOUT_EFFECT or (key.startswith(TRAINER) and key not in WITH_EFFECT):
        return
    nested = isinstance(before, Mapping) and isinstance(now, Mapping)
    if not nested:
        yield key, before, now
    elif before.get("class_path") != now.get("class_path"):
        yield f"{key}.class_path", before.get("class_path"), now.get("class_path")
    else:
        if ROWS.match(key) and key.endswith(".datasets"):
            before, now = _with_settings(before), _with_settings(now)
        for name in {**before, **now}:
            yield from _differences(before.get(name), now.get(name), f"{key}.{name}".lstrip("."))


def _with_settings(datasets: Mapping[str, Any]) -> dict[str, Any]:
    """The datasets of a mixture, each with all settings; without settings a config may name its rows alone."""
    return {
        name: {**vars(MixedDataset("")), **(each if isinstance(each, Mapping) and "data" in each else {"data": each})}
        for name, each in datasets.items()
    }


def _leaves(config: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(config, Mapping):
        for name, value in config.items():
            yield from _leaves(value, f"{key}.{name}")
    else:
        yield key, config


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
