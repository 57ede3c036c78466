"""What says that a checkpoint is complete: the run's progress, and every file with its size and SHA-256."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlflow.errors import UserError, did_you_mean
from rlflow.storage.tensors import sha256

FORMAT = 11
LAST = "last"
AUTO = "auto"  # `last` if there is one
STATE = "state.json"
OF_RANK = "logged"  # in the names of files of what a rank alone has
MODULE = "module-state"  # in the names of files of the module's tensors; no role is called so
NAME = re.compile(r"step-\d{8}")


@dataclass(frozen=True)
class Progress:
    """Where a run stands, and what it must be continued with.

    Attributes:
        step: Steps that are done.
        seed: Seed of the run.
        data: Digest of the training rows.
        config: The resolved config, without secrets; None for a run without one.
        state: JSON-able state of each part, see `rlflow.checkpoint.contents.Checkpoint`.
    """

    step: int
    seed: int
    data: str
    config: Mapping[str, Any] | None = None
    state: dict[str, Any] = field(default_factory=dict)


def write_manifest(folder: Path, progress: Progress, files: Mapping[str, tuple[str, int, int]]) -> None:
    """Write it into a checkpoint that is complete but for it, with a digest of itself.

    Args:
        folder: Folder of the checkpoint.
        progress: Progress of the run.
        files: SHA-256 and bytes of each file by name, and the rank that wrote it.
    """
    listed = {name: {"size": size, "sha256": digest, "rank": rank} for name, (digest, size, rank) in files.items()}
    stored = {"format": FORMAT, **asdict(progress), "files": dict(sorted(listed.items()))}
    (folder / STATE).write_text(json.dumps({"sha256": digest_of(stored), **stored}, indent=2) + "\n")


def folder_of(parent: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` steps: `<parent>/step-00000020`."""
    return parent / f"step-{step:08d}"


def newest_first(run_dir: Path) -> list[Path]:
    """The run's checkpoints, damaged ones too; drafts are none."""
    return sorted(found for found in (run_dir / "checkpoint").glob("step-*") if NAME.fullmatch(found.name))[::-1]


def lacks(folder: Path) -> str | None:
    """What is missing from a checkpoint, has another size, or is not what was written; None for nothing.

    Compares the sizes of its files; `changed_files` compares their contents.
    """
    if not (folder / STATE).is_file():
        return f"no {STATE}"
    try:
        stored = _read(folder)
        files = stored["files"] if stored["format"] == FORMAT else {}  # of another format, `read_progress` says so
        sizes = {name: written["size"] for name, written in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"a {STATE} that is not what was written"
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file():
            return f"no {name}"
        if file.stat().st_size != size:
            return f"{file.stat().st_size:,} of the {size:,} bytes of {name}"
    return None


def find(
    path: str,
    run_dir: Path,
    damage: Callable[[Path], str | None] = lacks,
    report: Callable[[str], object] = lambda line: None,
    listed: Callable[[Path], list[Path]] = newest_first,
) -> Path | None:
    """The checkpoint that `trainer.ckpt_path` names: `last` of the run's own folder that is whole, or a given folder.

    Args:
        path: `trainer.ckpt_path` as the user wrote it.
        run_dir: Folder of the run.
        damage: Returns what a checkpoint has in place of what was written; None for nothing.
        report: Receives a line for each checkpoint that is damaged and passed over for an older one.
        listed: Lists the checkpoints of a run, newest first.

    Returns:
        Its folder; None where `auto` finds none, which is otherwise `last`.

    Raises:
        UserError: There is none, or the one that is named is damaged.
    """
    if path not in (LAST, AUTO):
        folder = Path(path)
        what = damage(folder)
        if what is not None:
            raise UserError(
                f"`trainer.ckpt_path` is {path!r}, which has {what}; give a checkpoint's folder, `{LAST}` or `{AUTO}`."
                f"{did_you_mean(path, (LAST, AUTO))}"
            )
        return folder
    passed: list[tuple[Path, str]] = []
    for folder in listed(run_dir):
        what = damage(folder)
        if what is None:
            for newer, why in passed:
                report(f"{newer} has {why}, so it is passed over for {folder.name}")
            return folder
        passed.append((folder, what))
    if path == AUTO:
        for newer, why in passed:
            report(f"{newer} has {why}, and there is no other, so the run begins anew")
        return None
    damaged = "; ".join(f"{of.name} has {why}" for of, why in passed)
    whole = f" that is whole ({damaged})" if passed else ""
    raise UserError(
        f"`trainer.ckpt_path` is `last`, but {run_dir} has no checkpoint{whole}; leave it out to start anew"
    )


def monitored_value(folder: Path, monitor: str | None) -> float | None:
    """The value that a checkpoint which lacks nothing has of a metric; None for none."""
    value = _read(folder).get("state", {}).get("monitored", {}).get(monitor)
    return None if value is None else float(value)


def read_progress(folder: Path, seed: int, data: str) -> Progress:
    """Read the progress of a run at its checkpoint.

    Args:
        folder: Folder of the checkpoint.
        seed: Seed of the run that is to continue it.
        data: Digest of that run's training rows.

    Raises:
        UserError: It cannot be continued by this run: another format, seed or dataset.
    """
    stored = _read(folder)
    if (version := stored.pop("format")) != FORMAT:
        raise UserError(
            f"{folder} has the checkpoint format {version}; this version of rlflow reads format {FORMAT}: continue it"
            " with the version that wrote it, or start a new run from the `model` next to it"
        )
    del stored["files"]
    progress = Progress(**stored)
    if progress.seed != seed:
        raise UserError(f"`seed` is {seed}, but {folder} was made with {progress.seed}; continue with the same seed")
    if progress.data != data:
        raise UserError(f"the training rows are not those that {folder} was made with; continue with the same `data`")
    return progress


def changed_files(folder: Path, rank: int, world_size: int) -> list[str]:
    """Read this rank's share of a checkpoint's files, and return those whose content is not what was written.

    Args:
        folder: Folder of the checkpoint.
        rank: This process's rank.
        world_size: Number of ranks that divide the files among them, by size; each file is read by one rank.
    """
    files: dict[str, dict[str, Any]] = _read(folder).get("files", {})
    to_read = [0] * world_size  # bytes by rank
    changed = []
    for name, written in sorted(files.items(), key=lambda file: -file[1]["size"]):
        reader = to_read.index(min(to_read))
        to_read[reader] += written["size"]
        if reader == rank and sha256(folder / name) != written["sha256"]:
            changed.append(name)
    return sorted(changed)


def damage(folder: Path, rank: int = 0, world_size: int = 1) -> str | None:
    """What a checkpoint has in place of what was written, in the files that this rank reads; None for nothing.

    Args:
        folder: Folder of the checkpoint.
        rank: This process's rank.
        world_size: Number of ranks that divide the files among them.
    """
    try:
        if (what := lacks(folder)) is not None:
            return what
        changed = changed_files(folder, rank, world_size)
    except OSError as error:
        return f"{Path(error.filename or folder).name}, which cannot be read ({error.strerror})"
    return f"another SHA-256 of {changed[0]} than {STATE} says" if changed else None


def _read(folder: Path) -> dict[str, Any]:
    """The manifest; of an older format, which has no digest of itself, whatever is there.

    Raises:
        ValueError: It is not what was written.
    """
    stored: dict[str, Any] = json.loads((folder / STATE).read_text())
    written = stored.pop("sha256", None)
    if digest_of(stored) != written and (written is not None or stored["format"] == FORMAT):
        raise ValueError("its digest is another")
    return stored


def digest_of(stored: Any) -> str:
    """SHA-256 of what JSON holds, without regard to its form."""
    return hashlib.sha256(json.dumps(stored, sort_keys=True).encode()).hexdigest()
