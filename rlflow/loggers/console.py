"""What a run shows: its own progress on the terminal, and what its libraries print in a log."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from rlflow.loggers.progress import Display, LinePerStep, LiveBar
from rlflow.process.terminal import lasting

MOST_BYTES = 64 * 2**20
POLL_S = 1.0
KEPT = 4  # a quarter of the bytes at the beginning stays, and a quarter at the end


class Console:
    """Sends all that a process prints to a log file, C++ libraries included, and shows progress on the real terminal.

    Entered after the ranks are started, since a process started meanwhile would take the log for its terminal. When
    left, by an error too, the terminal is given back, so that the error's message reaches it.

    Args:
        log: File that what is printed is appended to; its folder is made if need be.
        total_steps: Of the run.
        steps_done: Before this run, when it goes on from a checkpoint.
        shows: Whether this process speaks on the terminal; rank 0 does.
    """

    def __init__(self, log: Path, total_steps: int, steps_done: int = 0, shows: bool = True) -> None:
        self._log = log
        self._total_steps = total_steps
        self._steps_done = steps_done
        self._shows = shows

    def __enter__(self) -> Console:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        _flush()
        self._stdout, self._stderr = os.dup(1), os.dup(2)
        self._terminal = lasting(os.dup(1))
        with self._log.open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        self._limit = LogLimit(self._log)
        self._display = self._choose_display()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._display is not None:
            self._display.close()
        _flush()
        self._limit.close()
        os.dup2(self._stdout, 1)
        os.dup2(self._stderr, 2)
        os.close(self._stdout)
        os.close(self._stderr)
        self._terminal.close()

    def begin(self) -> None:
        """Tell the time left from here on: the first step starts."""
        if self._display is not None:
            self._display.begin(time.monotonic())

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that step `step` (the first is 1) is done. `metrics` of validation are shown until the next ones."""
        if self._display is not None:
            self._display.step(step, metrics, time.monotonic())

    def say(self, line: str) -> None:
        """Show one line on the terminal, above the live display."""
        if self._display is not None:
            self._display.say(line)

    def _choose_display(self) -> Display | None:
        if not self._shows:
            return None
        display = LiveBar if self._terminal.isatty() else LinePerStep
        return display(self._terminal, self._total_steps, self._steps_done, time.monotonic())


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


def _flush() -> None:
    """Write out what Python and C hold back, so that it goes where it went when it was printed."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
