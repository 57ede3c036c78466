"""What says that a checkpoint is complete: the run's progress, and every file with its size and SHA-256."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlflow.errors import UserError
from rlflow.storage.tensors import sha256

FORMAT = 7
STATE = "state.json"
NAME = re.compile(r"step-\d{8}")


@dataclass(frozen=True)
class Progress:
    """Where a run stands, and what it must be continued with.

    Attributes:
        step: Steps done.
        version: Of the followed policy's weights; 0 where nothing generates.
        seed: Of the run.
        data: Digest of the training rows.
        draws: How often prompts were drawn.
        before: Validation before the first step.
        module: The module's own state.
        callbacks: The callbacks' states, by `Callback.state_key`.
        chosen: The rows of epochs that the module chose, see `rlflow.data.chosen_rows`; None where it does not choose.
        prompts_per_step: Prompts of one draw, which the chosen rows are cut by; None in a checkpoint without it.
    """

    step: int
    version: int
    seed: int
    data: str
    draws: int
    before: dict[str, float] = field(default_factory=dict)
    module: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    chosen: list[dict[str, Any]] | None = None
    prompts_per_step: int | None = None


@dataclass(frozen=True)
class Written:
    """A file of a checkpoint.

    Attributes:
        size: Bytes.
        sha256: Of its content.
        rank: Which wrote it.
    """

    size: int
    sha256: str
    rank: int


def write_manifest(folder: Path, progress: Progress, files: Mapping[str, Written]) -> None:
    """Write it into a checkpoint that is complete but for it."""
    stored = {"format": FORMAT, **asdict(progress), "files": {name: asdict(files[name]) for name in sorted(files)}}
    (folder / STATE).write_text(json.dumps(stored, indent=2) + "\n")


def find(path: str, run_dir: Path) -> Path:
    """The checkpoint that `trainer.ckpt_path` names: `last` of the run's own folder, or a checkpoint's folder.

    Raises:
        UserError: There is none.
    """
    if path == "last":
        named = sorted(found for found in (run_dir / "checkpoint").glob("step-*") if NAME.fullmatch(found.name))
        complete = next((found for found in reversed(named) if lacks(found) is None), None)
        if complete is None:
            of_last = f" that is complete ({named[-1].name} has {lacks(named[-1])})" if named else ""
            raise UserError(
                f"`trainer.ckpt_path` is `last`, but {run_dir} has no checkpoint{of_last}; leave it out to start anew"
            )
        return complete
    folder = Path(path)
    what = lacks(folder)
    if what is not None:
        raise UserError(f"`trainer.ckpt_path` is {path!r}, which has {what}; give a checkpoint's folder, or `last`")
    return folder


def lacks(folder: Path) -> str | None:
    """What of a checkpoint is not there, or not as long as it was; None if all is."""
    try:
        stored = json.loads((folder / STATE).read_text())
        files = stored["files"] if stored["format"] == FORMAT else {}  # of another format, `read_progress` says so
        sizes = {name: written["size"] for name, written in files.items()}
    except (OSError, ValueError, KeyError, TypeError):
        return f"no {STATE}"
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file():
            return f"no {name}"
        if file.stat().st_size != size:
            return f"{file.stat().st_size:,} of the {size:,} bytes of {name}"
    return None


def read_progress(folder: Path, seed: int, data: str) -> Progress:
    """Where the checkpointed run stood.

    Args:
        folder: Of the checkpoint.
        seed: Of the run that is to continue it.
        data: Digest of that run's training rows.

    Raises:
        UserError: It cannot be continued by this run: another format, seed or dataset.
    """
    stored = json.loads((folder / STATE).read_text())
    if (version := stored.pop("format")) != FORMAT:
        raise UserError(
            f"{folder} has the checkpoint format {version}; this version of rlflow reads format {FORMAT}: continue it"
            " with the version that wrote it, or start a new run from the `model` beside it"
        )
    del stored["files"]
    progress = Progress(**stored)
    if progress.seed != seed:
        raise UserError(f"`seed` is {seed}, but {folder} was made with {progress.seed}; continue with the same seed")
    if progress.data != data:
        raise UserError(f"the training rows are not those that {folder} was made with; continue with the same `data`")
    return progress


def changed_files(folder: Path, rank: int, world_size: int) -> list[str]:
    """This rank's share of a checkpoint's files is read: those whose content is not what was written.

    Args:
        folder: Of the checkpoint.
        rank: This one.
        world_size: The ranks that divide the files among them, by size; each file is read by one.
    """
    files: dict[str, dict[str, Any]] = json.loads((folder / STATE).read_text())["files"]
    to_read = [0] * world_size  # bytes by rank
    changed = []
    for name, written in sorted(files.items(), key=lambda file: -file[1]["size"]):
        reader = to_read.index(min(to_read))
        to_read[reader] += written["size"]
        if reader == rank and sha256(folder / name) != written["sha256"]:
            changed.append(name)
    return sorted(changed)
