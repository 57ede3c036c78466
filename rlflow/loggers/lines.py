"""Reading a file that a process which was killed may have been writing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def whole_lines(file: Path) -> Iterator[str]:
    """Its lines, without one at the end that was left unfinished."""
    with file.open(encoding="utf-8", errors="replace", newline="\n") as text:
        yield from (line for line in text if line.endswith("\n"))
