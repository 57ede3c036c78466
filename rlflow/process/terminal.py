"""Standard output and error that survive the end of their reader, such as a terminal that is closed or `| head`."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from typing import Any, TextIO


def outlast() -> None:
    """From now on, drop what cannot be written to standard output or error; open one that is closed."""
    for number in (1, 2):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            if null != number:
                os.close(null)
    sys.stdout, sys.stderr = lasting(1, closefd=False), lasting(2, closefd=False)


def lasting(number: int, closefd: bool = True) -> TextIO:
    """The open text file of a file descriptor; lines that cannot be written are dropped.

    Args:
        number: Number of the file, see `os.open`.
        closefd: Whether closing what is returned closes it.
    """
    file = io.BufferedWriter(_LastingFile(number, "w", closefd=closefd))
    return io.TextIOWrapper(file, "utf-8", "backslashreplace", line_buffering=number == 2 or os.isatty(number))


class _LastingFile(io.FileIO):
    def write(self, data: Any, /) -> int:
        with contextlib.suppress(OSError):
            while (written := super().write(data)) is None:  # its reader had it made non-blocking
                select.select([], [self], [])
            return written
        return memoryview(data).nbytes
