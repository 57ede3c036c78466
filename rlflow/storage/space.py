"""Free space on a disk, checked before it is needed."""

from __future__ import annotations

import shutil
from pathlib import Path

from rlflow.errors import UserError

SMALL_FILES = 2**20  # bytes for files that are not counted one by one: configurations, JSON, tokenizers


def require_space(folder: Path, needed: int, what: str, fix: str) -> None:
    """Refuse to write a folder if the disk has too little free space.

    Args:
        folder: Folder to write; it need not exist yet.
        needed: Bytes to write.
        what: Words of the error before the number of bytes: "the checkpoints of this run need".
        fix: Advice in the error, in addition to freeing space.

    Raises:
        UserError: Fewer bytes are free.
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < needed + SMALL_FILES:
        raise UserError(
            f"{folder} has {in_bytes(free)} left on its disk, and {what} {in_bytes(needed + SMALL_FILES)}; free some,"
            f" {fix}"
        )


def bytes_in(folder: Path) -> int:
    """Bytes of all files in a folder; 0 where it does not exist."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def in_bytes(nbytes: float) -> str:
    """A number of bytes as text, in a unit that makes it short: `152.0 kB`."""
    for unit, size in {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}.items():
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} B"
