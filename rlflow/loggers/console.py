"""What a run shows: its own progress on the terminal, and what its libraries print in a log."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from rlflow.loggers.log_limit import LogLimit
from rlflow.loggers.progress import Display, LinePerStep, LiveBar
from rlflow.process.terminal import lasting


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


def _flush() -> None:
    """Write out what Python and C hold back, so that it goes where it went when it was printed."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
