"""A log that does not fill the disk: of what is too much the middle is left out."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

MOST_BYTES = 64 * 2**20
POLL_S = 1.0
KEPT = 4  # a quarter of the bytes at the beginning stays, and a quarter at the end


class LogLimit:
    """Cuts a log when it is too long, while others append to it; it is looked at every second.

    A pipe that counts what goes through it would hold up a process whose interpreter is busy, so the file is cut
    instead. What is written in the very moment of a cut may be lost.

    Args:
        log: The file; it is open for appending in whatever writes it.
        most_bytes: It may have, but for what a second brings.
    """

    def __init__(self, log: Path, most_bytes: int = MOST_BYTES) -> None:
        self._log = log
        self._most = most_bytes
        self._left_out = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="log-limit")
        self._thread.start()

    def close(self) -> None:
        """Look once more, and no further."""
        self._over.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._over.wait(POLL_S):
            self._look()

    def _look(self) -> None:
        with contextlib.suppress(OSError):  # a folder that was removed, or a full disk, is no reason to end
            if self._log.stat().st_size > self._most:
                self._cut()

    def _cut(self) -> None:
        part = self._most // KEPT
        with self._log.open("r+b") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(size - part)
            last = log.read(part)
            self._left_out += size - 2 * part
            log.truncate(part)
        with self._log.open("ab") as log:
            log.write(f"\n... {self._left_out:,} bytes of the log are left out here ...\n".encode() + last)
