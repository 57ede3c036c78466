"""`Output`, a thread that reads what a process prints and stores only its beginning and its end."""

from __future__ import annotations

import os
import threading
from typing import IO


class Output(threading.Thread):
    """Reads a pipe in a thread until every process that can write to it is gone; starts by itself.

    From the 26 letters, `Output(pipe, last=3, first=2)` stores `ab` and `xyz`. `join()` waits for the end.

    Args:
        pipe: Pipe to read; closed at its end.
        last: Bytes to store of its end, 1 or more.
        first: Bytes to store of its beginning.
    """

    def __init__(self, pipe: IO[bytes], last: int, first: int = 0) -> None:
        super().__init__(daemon=True, name="output")
        self._pipe = pipe
        self._sizes = first, last
        self._first, self._last = bytearray(), bytearray()
        self.start()

    @property
    def first_text(self) -> str:
        """The first `first` bytes so far, as text; bytes that are not UTF-8 are replaced."""
        return bytes(self._first).decode(errors="replace")

    @property
    def last_text(self) -> str:
        """The last `last` bytes so far, as text; bytes that are not UTF-8 are replaced."""
        return bytes(self._last).decode(errors="replace")

    def run(self) -> None:
        first, last = self._sizes
        with self._pipe:
            while part := os.read(self._pipe.fileno(), 1 << 16):
                self._first += part[: first - len(self._first)]
                self._last += part
                del self._last[:-last]
