"""What a process prints, read as it comes: whatever its length, its beginning and its end are kept and no more."""

from __future__ import annotations

import os
import threading
from typing import IO


class Output(threading.Thread):
    """Reads a pipe until every process that can write to it is gone.

    Args:
        pipe: What is read; closed at its end.
        last: How many bytes of its end are kept, 1 or more.
        first: How many bytes of its beginning are kept.
    """

    def __init__(self, pipe: IO[bytes], last: int, first: int = 0) -> None:
        super().__init__(daemon=True, name="output")
        self._pipe = pipe
        self._sizes = first, last
        self._first, self._last = bytearray(), bytearray()
        self.start()

    @property
    def first_text(self) -> str:
        """What is kept of the beginning."""
        return bytes(self._first).decode(errors="replace")

    @property
    def last_text(self) -> str:
        """What is kept of the end."""
        return bytes(self._last).decode(errors="replace")

    def run(self) -> None:
        first, last = self._sizes
        with self._pipe:
            while part := os.read(self._pipe.fileno(), 1 << 16):
                self._first += part[: first - len(self._first)]
                self._last += part
                del self._last[:-last]
