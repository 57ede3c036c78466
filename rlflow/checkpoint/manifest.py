"""The manifest of a complete checkpoint: the run's progress, and the size and SHA-256 of every file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlflow.errors import UserError, did_you_mean
from rlflow.storage.safetensors_files import sha256

FORMAT = 15
LAST = "last"
AUTO = "auto"  # `last` if there is one
BEST = "best"
STATE = "state.json"
OF_RANK = "logged"  # how names of files with the state of one rank begin
MODULE = "module-state"  # how names of files with the module's tensors begin; no role has this name
NAME = re.compile(r"step-\d{8}")


@dataclass(frozen=True)
class Progress:
    """Progress of a run, and what has to be the same when it resumes.

    Attributes:
        step: Number of steps that are done.
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
    """Write `state.json`, the last file of a checkpoint, with a digest of its own content.

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
    """Folders of the run's checkpoints, the newest first, damaged ones included; drafts are left out."""
    return sorted(found for found in (run_dir / "checkpoint").glob("step-*") if NAME.fullmatch(found.name))[::-1]


def lacks(folder: Path) -> str | None:
    """Damage of a checkpoint: a missing file, a file of another size, or a damaged `state.json`; else None.

    Sizes of files are compared here; `changed_files` compares their contents.
    """
    if not (folder / STATE).is_file():
        return f"no {STATE}"
    try:
        stored = _read(folder)
        files = stored["files"] if stored["format"] == FORMAT else {}  # `read_progress` reports another format
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
    """Find the checkpoint that `trainer.ckpt_path` names: the newest or the best undamaged one, or a given folder.

    Args:
        path: `trainer.ckpt_path` as the user wrote it: `last`, `auto`, `best` or a folder.
        run_dir: Folder of the run.
        damage: Says what is wrong with a checkpoint, see the function `damage`; None if nothing is.
        report: Receives a line for each damaged checkpoint that is skipped.
        listed: Lists the checkpoints of a run, newest first; for `best`, the best first.

    Returns:
        The checkpoint's folder; None where `auto` finds none. Otherwise `auto` does the same as `last`.

    Raises:
        UserError: The run has no undamaged checkpoint, or the given folder is damaged.
    """
    if path not in (LAST, AUTO, BEST):
        folder = Path(path)
        what = damage(folder)
        if what is not None:
            raise UserError(
                f"`trainer.ckpt_path` is {path!r}, which has {what}; give a checkpoint's folder, `{LAST}`, `{BEST}` or"
                f" `{AUTO}`.{did_you_mean(path, (LAST, AUTO, BEST))}"
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
            report(f"{newer} has {why}, and there is no other checkpoint, so a new run starts")
        return None
    damaged = "; ".join(f"{of.name} has {why}" for of, why in passed)
    whole = f" that is whole ({damaged})" if passed else ""
    raise UserError(
        f"`trainer.ckpt_path` is `{path}`, but {run_dir} has no checkpoint{whole}; leave it out to start a new run"
    )


def monitored_values(folders: Iterable[Path], monitor: str | None) -> dict[Path, float | None]:
    """The checkpoints that lack no file, in their order, and the value of the metric `monitor` in each.

    It is None if a checkpoint has no such value.
    """
    found = {}
    for folder in folders:
        if lacks(folder) is None:
            value = _read(folder).get("state", {}).get("monitored", {}).get(monitor)
            found[folder] = None if value is None else float(value)
    return found


def read_progress(folder: Path, seed: int, data: str) -> Progress:
    """Read the progress of a run at its checkpoint.

    Args:
        folder: Folder of the checkpoint.
        seed: Seed of the run that is to continue it.
        data: Digest of that run's training rows.

    Raises:
        UserError: This run cannot resume from it: its format, seed or dataset is another.
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
    """The damage that this rank finds when it reads its share of the files, in words after "has"; None for none.

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
    """The content of `state.json`. An older format has no digest of its own content and is returned unchecked.

    Raises:
        ValueError: The content does not match its digest.
    """
    stored: dict[str, Any] = json.loads((folder / STATE).read_text())
    written = stored.pop("sha256", None)
    if digest_of(stored) != written and (written is not None or stored["format"] == FORMAT):
        raise ValueError("its digest is another")
    return stored


def digest_of(stored: Any) -> str:
    """SHA-256 of a JSON-able value, the same for any order of keys."""
    return hashlib.sha256(json.dumps(stored, sort_keys=True).encode()).hexdigest()
