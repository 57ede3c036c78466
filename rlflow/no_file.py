"""What lies at a path where a file is expected and none is, for errors."""

from __future__ import annotations

import stat
from collections.abc import Callable, Mapping
from pathlib import Path

_KINDS: Mapping[Callable[[int], bool], str] = {
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISSOCK: "a socket",
}


def no_file(path: str, wanted: str, *endings: str) -> str:
    """How an error goes on after a path at which no file lies: what does, and what to give.

    Args:
        path: As the user wrote it.
        wanted: What to give.
        endings: Of such a file's name; one in the folder that the path may name is told.
    """
    if not path:
        return f", which names nothing; give {wanted}"
    try:
        mode = Path(path).stat().st_mode
        inside = sorted(each.name for each in Path(path).iterdir()) if stat.S_ISDIR(mode) else []
    except (OSError, ValueError):  # there is nothing, or no name that a file can have
        return f", and there is no such file in {Path.cwd()}; check the path"
    if stat.S_ISDIR(mode):
        near = next((f", such as {Path(path) / name}" for name in inside if name.endswith(endings)), "")
        return f", which is a folder; give {wanted}{near}"
    kind = next((kind for is_one, kind in _KINDS.items() if is_one(mode)), "no file")
    return f", which is {kind}; give {wanted}"
