"""The output of a run: its own progress on the terminal, and the output of its libraries in a log."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from rlflow.errors import readable
from rlflow.process.terminal import lasting
from rlflow.settings import VALIDATION

MOST_BYTES = 64 * 2**20
POLL_S = 1.0
KEPT = 4  # a quarter of the bytes at the beginning stays, and a quarter at the end
# The metric of each label, and its form; shown if the run logs it, the first ones also where there is little room.
# `*/kl` is of each trained role.
SHOWN = {
    "reward": ("reward/mean", "{:.3f}"),
    "accuracy": ("val/accuracy", "{:.3f}"),
    "margin": ("val/margin", "{:.3f}"),
    "length": ("rollout/length", "{:.1f}"),
    "cut": ("rollout/truncated", "{:.1%}"),
    "kl": ("*/kl", "{:.4f}"),
    "grad": ("*/grad_norm", "{:.2f}"),
}
SAMPLED = ("reward/mean", "rollout/length")  # with these no loss is shown: a policy's does not measure progress
PHASES = 3  # of a step at most: those that took a tenth of it or more
NO_PHASES = {"step", "elapsed", "exchange_wait", "straggler_rank", "straggler_share"}
NARROW = 80  # columns; with fewer the bar is short
PATIENCE_S = 2.0  # what takes longer is named
RECENT = 10  # the last steps; the time left is estimated from their pace


@contextmanager
def open_console(log: Path, total_steps: int, steps_done: int = 0, shows: bool = True) -> Iterator[Console]:
    """Send all that a process prints to a log file, C++ libraries included, and show progress on the real terminal.

    Entered after the ranks are started, since a process started within would take the log for its terminal. When
    left, by an error too, the terminal is given back, so that the error's message reaches it.

    Args:
        log: File that what is printed is appended to; its folder is made if need be.
        total_steps: Steps of the run.
        steps_done: Steps done before, if the run is resumed from a checkpoint.
        shows: Whether this process speaks on the terminal; rank 0 does.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    _flush()
    stdout, stderr = os.dup(1), os.dup(2)
    terminal = lasting(os.dup(1))
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    watched = not faulthandler.is_enabled()
    if watched:
        faulthandler.enable(2)  # a crash in C leaves the stacks of all threads in the log
    limit = LogLimit(log)
    console = Console(terminal if shows else None, total_steps, steps_done)
    try:
        yield console
    finally:
        console.close()
        _flush()
        limit.close()
        if watched:
            faulthandler.disable()
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.close(stdout)
        os.close(stderr)
        terminal.close()


class Console:
    """The steps of a run as they end: a bar that moves in place on a terminal, one plain line per step elsewhere.

    Args:
        terminal: File to write to; None on ranks that show nothing.
        total_steps: Steps of the run.
        steps_done: Steps done before, if the run is resumed from a checkpoint.
        clock: Seconds of a clock that only goes forward.
    """

    def __init__(
        self, terminal: TextIO | None, total_steps: int, steps_done: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._terminal = terminal
        self._total_steps = total_steps
        self._clock = clock
        self._validated: dict[str, str] = {}  # by label, with the step
        self._ended = deque([(steps_done, clock())], maxlen=RECENT + 1)
        self._live = _live_bar(terminal, total_steps, steps_done)

    def begin(self) -> None:
        """Estimate the time left from now on: the first step starts, and loading does not measure the pace."""
        steps_done, _ = self._ended.pop()
        self._ended.append((steps_done, self._clock()))

    def step(self, step: int, metrics: Mapping[str, float], asked: Collection[str] = ()) -> None:
        """Show that step `step` (the first is 1) is done.

        A line has only what the step logged; the bar, which is the only one, also has the last validation.

        Args:
            step: Number of the step.
            metrics: Metrics of the step.
            asked: Names of metrics that are shown first, because a module logs them with `prog_bar`.
        """
        labelled = {metric for metric, _ in SHOWN.values()}
        new = {name: f"{name} {metrics[name]:.4g}" for name in sorted({*asked} - labelled) if name in metrics}
        new |= _fields(metrics)
        left = f"left {self._left(step)}"
        if self._live is None:
            self.say("  ".join([f"step {step}/{self._total_steps}", *new.values(), left]))
            return
        of = self._validated | new
        before = len(f"step {step}/{self._total_steps}  ") + _bar_width(self._live.console) + 1
        fitting = _fitting([of[label] for label in sorted(of, key=_place)], left, self._live.console.width - before)
        self._live.update(self._live.task_ids[0], completed=step, shown=fitting)
        validated = (label for label in new if SHOWN.get(label, (label,))[0].startswith("val/"))
        self._validated |= {label: f"{new[label]} (step {step})" for label in validated}

    def phase(self, doing: str) -> AbstractContextManager[None]:
        """Name what is done, such as `loading models`, if it takes more than `PATIENCE_S`."""
        return named_if_long(doing, self.say)

    def say(self, line: str) -> None:
        """Show one line on the terminal, above the live bar."""
        if self._live is not None:
            self._live.console.print(readable(line), markup=False, highlight=False, soft_wrap=True)
        elif self._terminal is not None:
            print(readable(line), file=self._terminal, flush=True)

    def close(self) -> None:
        """End the display, so that text can follow on the terminal."""
        if self._live is not None:
            self._live.stop()

    def _left(self, step: int) -> str:
        self._ended.append((step, self._clock()))
        (first_step, began), (_, ended) = self._ended[0], self._ended[-1]
        return duration((ended - began) / (step - first_step) * (self._total_steps - step))


@contextmanager
def named_if_long(doing: str, say: Callable[[str], None]) -> Iterator[None]:
    """Say what is done within it, such as `loading models`, if it takes more than `PATIENCE_S`."""
    timer = threading.Timer(PATIENCE_S, say, [f"{doing} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _fields(metrics: Mapping[str, float]) -> dict[str, str]:
    """The metrics of a step by label, such as `reward 0.512` and `step 2 s (rollout 1.1)`."""
    found = {} if any(metric in metrics for metric in SAMPLED) else _of_roles("loss", "*/loss", "{:.3f}", metrics)
    for label, (metric, form) in SHOWN.items():
        if metric.startswith("*"):
            found |= _of_roles(label, metric, form, metrics)
        elif metric in metrics:
            found[label] = f"{label} {form.format(metrics[metric])}"
    if (seconds := metrics.get("time/step", 0.0)) > 0:
        if "rollout/tokens" in metrics:
            found["tokens/s"] = f"tokens/s {metrics['rollout/tokens'] / seconds:,.0f}"
        of = {name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")}
        longest = sorted((name for name in of if name not in NO_PHASES), key=lambda name: -of[name])[:PHASES]
        phases = ", ".join(f"{name} {_short(of[name])}" for name in longest if of[name] >= seconds / 10)
        found["step"] = f"step {_short(seconds)} s" + (f" ({phases})" if phases else "")
    return found


def _of_roles(label: str, metric: str, form: str, metrics: Mapping[str, float]) -> dict[str, str]:
    """A metric of the roles: `loss 0.512`, with the role's name where there are several."""
    end = metric.removeprefix("*")
    roles = [name.removesuffix(end) for name in metrics if name.endswith(end) and not name.startswith(VALIDATION)]
    labels = {role: f"{role} {label}" if len(roles) > 1 else label for role in roles}
    return {each: f"{each} {form.format(metrics[role + end])}" for role, each in labels.items()}


def _place(label: str) -> int:
    """The place of a label in a line: what modules asked for comes first, then losses, and times last."""
    labels = ["loss", *SHOWN, "tokens/s", "step"]
    name = label.rpartition(" ")[2]
    return labels.index(name) if name in labels else -1


def _fitting(fields: Sequence[str], last: str, width: int) -> str:
    """The first fields that fit into a width together with the last one."""
    chosen: list[str] = []
    for field in fields:
        if len("  ".join([*chosen, field, last])) > width:
            break
        chosen.append(field)
    return "  ".join([*chosen, last])


def _bar_width(console: RichConsole) -> int:
    return 20 if console.width >= NARROW else 6


def _live_bar(terminal: TextIO | None, total_steps: int, steps_done: int) -> Progress | None:
    """A bar on a terminal, started; None where the output is not a terminal."""
    if terminal is None or not terminal.isatty():
        return None
    console = RichConsole(file=terminal)
    progress = Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=_bar_width(console)),
        TextColumn("{task.fields[shown]}", table_column=Column(no_wrap=True)),
        console=console,
        redirect_stdout=False,  # what is printed goes to the log
        redirect_stderr=False,
        refresh_per_second=2,
    )
    progress.add_task("", total=total_steps, completed=steps_done, shown="")
    progress.start()
    return progress


def _short(seconds: float) -> str:
    return f"{seconds:.2g}" if seconds < 10 else f"{seconds:.0f}"


def duration(seconds: float) -> str:
    """`2:10` or `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class LogLimit:
    """Cuts a log when it is too long, while others append to it; it is looked at every second.

    A pipe that counted its bytes would block a process while its interpreter is busy, so the file is cut instead. What
    is written in the very moment of a cut may be lost.

    Args:
        log: The file; all its writers have it open for appending.
        most_bytes: Largest size of the file, not counting what is written within a second.
    """

    def __init__(self, log: Path, most_bytes: int = MOST_BYTES) -> None:
        self._log = log
        self._most = most_bytes
        self._left_out = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="log-limit")
        self._thread.start()

    def close(self) -> None:
        """Check the size once more, then stop."""
        self._over.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._over.wait(POLL_S):
            self._look()

    def _look(self) -> None:
        with suppress(OSError):  # a folder that was removed, or a full disk, is not a reason to end
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
    """Write out the buffers of Python and C, so that the text goes where it was printed."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
