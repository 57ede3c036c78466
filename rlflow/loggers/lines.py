"""Reading a file that a process which was killed may have been writing, or that a disk has damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.errors import UserError


def whole_lines(file: Path) -> Iterator[bytes]:
    """Its lines, without one at the end that was left unfinished.

    Raises:
        UserError: It cannot be read.
    """
    try:
        with file.open("rb") as lines:
            for line in lines:
                if line.endswith(b"\n") or b"\0" in line:  # no process wrote zeros: a file system lost what was there
                    yield line
    except OSError as error:
        raise UserError(
            f"{file} cannot be read ({error.strerror}); mend that disk or the file's rights, or move the file away"
        ) from error


def parsed_lines(file: Path, is_right: Callable[[Any], bool]) -> Iterator[tuple[bytes, Any]]:
    """Its whole lines and the JSON of each; None where it is damaged.

    Args:
        file: Of JSON lines.
        is_right: Whether a line's JSON is what a run writes there.

    Raises:
        UserError: It cannot be read.
    """
    for line in whole_lines(file):
        try:
            found = json.loads(line.decode())
        except (ValueError, RecursionError):
            found = None
        yield line, found if is_right(found) else None


def json_lines(file: Path, is_right: Callable[[Any], bool]) -> Iterator[dict[str, Any]]:
    """The JSON of its whole lines, see `parsed_lines`.

    Raises:
        UserError: It cannot be read, or a line is damaged.
    """
    for number, (_, found) in enumerate(parsed_lines(file, is_right), 1):
        if found is None:
            raise UserError(f"{file} is damaged: line {number} is not what a run writes there; remove that line")
        yield found


@dataclass
class Damage:
    """What of a file cannot be read, while a run goes on in it.

    Attributes:
        file: That is read.
        lines: How many are damaged.
        first: Their first, from 1.
        unreadable: Why the file cannot be read at all, or not to its end; empty where it can.
    """

    file: Path
    lines: int = 0
    first: int = 0
    unreadable: str = ""

    def add(self, number: int) -> None:
        """Note that a line is damaged."""
        self.first = self.first or number
        self.lines += 1

    def replace(self, draft: Path) -> list[str]:
        """Put what could be read in the file's place, in one move; if it was damaged it is kept under another name.

        Args:
            draft: With what could be read.

        Returns:
            What the user should know of it.
        """
        found = self.unreadable
        if self.lines:
            of = (
                f"line {self.first}" if self.lines == 1 else f"{self.lines} lines, the first of them line {self.first},"
            )
            found = f"{self.file} is damaged: {of} cannot be read"
        aside = self._aside()
        if found:
            os.replace(self.file, aside)
        os.replace(draft, self.file)
        went_on = f"it is kept as {aside.name}, and the run goes on with the lines that can be read"
        return [f"warning: {found}; {went_on}"] if found else []

    def _aside(self) -> Path:
        aside, number = self.file.with_name(f"{self.file.name}.damaged"), 0
        while aside.exists():
            number += 1
            aside = self.file.with_name(f"{self.file.name}.damaged-{number}")
        return aside
