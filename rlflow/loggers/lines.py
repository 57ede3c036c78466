"""Reads a file of lines that a killed process may have left unfinished, or that a disk has damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlflow.errors import UserError


def whole_lines(file: Path) -> Iterator[bytes]:
    """The lines of a file, without an unfinished one at the end.

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
            f"{file} cannot be read ({error.strerror}); repair that disk or the file's permissions, or move it away"
        ) from error


def parsed(line: bytes, is_right: Callable[[Any], bool]) -> Any:
    """The JSON of a line; None where it is damaged.

    Args:
        line: Line of a file of JSON lines.
        is_right: Whether a line's JSON is what a run writes there.
    """
    try:
        found = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return found if is_right(found) else None


def json_lines(file: Path, is_right: Callable[[Any], bool]) -> Iterator[dict[str, Any]]:
    """The JSON of a file's whole lines, see `parsed`.

    Raises:
        UserError: It cannot be read, or a line is damaged.
    """
    for number, line in enumerate(whole_lines(file), 1):
        found = parsed(line, is_right)
        if found is None:
            raise UserError(f"{file} is damaged: line {number} is not what a run writes there; remove that line")
        yield found


def continued(file: Path, first_step: int, step_of: Callable[[bytes], int | None]) -> list[str]:
    """Reduce a file to the lines of steps before the first step of a resumed run; make the file if there is none.

    The file is replaced in one move, so that a run killed in it leaves the old one or the new one. If the file was
    damaged, the damaged one is stored under another name, with `.damaged` at the end.

    Args:
        file: File of a logger's record.
        first_step: Lines of this step and later ones are dropped.
        step_of: The step of a line; None if the line is damaged.

    Returns:
        A warning if it was damaged.
    """
    damaged, found = list[int](), ""
    draft = file.with_name(f"{file.name}.draft")
    with draft.open("wb") as kept:
        try:
            for number, line in enumerate(whole_lines(file) if file.exists() else (), 1):
                step = step_of(line)
                if step is None:
                    damaged.append(number)
                elif step < first_step:
                    kept.write(line)
        except UserError as error:
            found = str(error)
    if damaged:
        many = f"{len(damaged)} lines, the first of them " if len(damaged) > 1 else ""
        found = f"{file} is damaged: {many}line {damaged[0]}{',' if many else ''} cannot be read"
    aside = _aside(file)
    if found:
        os.replace(file, aside)
    os.replace(draft, file)
    went_on = f"it is renamed to {aside.name}, and the run continues with the lines that can be read"
    return [f"warning: {found}; {went_on}"] if found else []


def _aside(file: Path) -> Path:
    """A new name in the file's folder."""
    aside, number = file.with_name(f"{file.name}.damaged"), 0
    while aside.exists():
        number += 1
        aside = file.with_name(f"{file.name}.damaged-{number}")
    return aside
