"""Signals that ask a run to end: noted by each rank, agreed on by all, obeyed once a checkpoint is saved.

A signal handler of Python runs in the main thread between two of its instructions, and therefore not while the main
thread waits for a collective. So another thread receives the signals, and ends the process when `grace_s` is over.

With `trainer.grace_s: 30`, a SIGTERM that rank 1 receives is noted there at 0 s; all ranks learn of it when they next
gather something, say at 2 s; they save, say until 9 s, and exit with code 3. A rank that is not done at 30 s is ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from rlflow.errors import Preempted
from rlflow.process import status

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
OVER = 0  # no signal has this number
EXIT_CODE = 3
GRACE_S = 30.0  # from the first signal to the end at the latest, as torchrun, Slurm and Kubernetes have it by default
BEGINNING_S = 5.0  # the same where nothing is to be saved yet, should the main thread wait in C
SAME_S = 2.0  # within which signals are one: a group's reaches a rank twice, from the process too that waits for it
BEGINNING = "the run had not begun, so nothing more was saved; start it again with the same command"


class _Preemption:
    """The signals that this process received, and the thread that ends it when its time is over.

    Attributes:
        received: The number of the first signal, in this process or on another rank; 0 for none.
        grace_s: Seconds from the first signal until the process is ended, whatever it does.
        begun: Whether the run decides when it ends, by polling `received`; before that a signal raises `Preempted`.
        last_line: The line for the terminal if the thread has to end the process: empty for the thread's own, None if
            the caller prints it.
        saved: Whether the checkpoint is complete; from then on further signals are ignored.
        raised: Whether `Preempted` was raised in the main thread, which may be before `received` is set.
    """

    def __init__(self) -> None:
        self.received = 0
        self.grace_s = GRACE_S
        self.begun = self.saved = self.raised = False
        self.last_line: str | None = ""
        self._first = 0.0
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._terminal = os.dup(2)  # where the user looks, whatever is redirected later
        self._thread = threading.Thread(target=self._watch, daemon=True, name="preemption")

    def begin(self) -> dict[int, Any]:
        """Handle `SIGNALS`, except SIGHUP under `nohup`; returns previous handlers, and at 0 the wakeup descriptor."""
        taken = [number for number in SIGNALS if not _is_ignored_hangup(number)]
        before: dict[int, Any] = {number: signal.signal(number, self._handle) for number in taken}
        for number in taken:
            signal.siginterrupt(number, False)  # libraries need not repeat a call
        before[0] = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread.start()
        return before

    def close(self) -> None:
        """End the thread and close its files; the previous handlers must be set again before."""
        os.write(self._writer, bytes([OVER]))  # closing would not do: children may have it open too
        self._thread.join()
        os.close(self._writer)
        os.close(self._reader)
        os.close(self._terminal)

    def agree(self, number: int) -> None:
        """Note a signal that another rank received; returns when `received` is set."""
        if not self.received:
            os.write(self._writer, bytes([number]))
            while not self.received:
                time.sleep(0.001)

    def _handle(self, number: int, _: FrameType | None) -> None:
        """Python's signal handler, in the main thread: raises `Preempted` before the run has begun, else nothing."""
        if not self.begun and not self.raised:
            self.raised = True
            raise Preempted(number, BEGINNING)

    def _watch(self) -> None:
        while True:
            grace_s = self.grace_s if self.begun else BEGINNING_S
            left = None if not self.received else max(0.0, self._first + grace_s - time.monotonic())
            readable, _, _ = select.select([self._reader], [], [], left)
            if not readable:
                if not self.begun:
                    self._end_at_once(BEGINNING)
                self._end_at_once(f"{self.grace_s:g} s (`trainer.grace_s`) were over before the run had ended")
            numbers = os.read(self._reader, 64)
            if OVER in numbers:
                return
            for number in numbers:
                if number in SIGNALS:
                    self._note(number)

    def _note(self, number: int) -> None:
        now = time.monotonic()
        if not self.received:
            self.received, self._first = number, now
            if self.begun and status.is_first() and os.isatty(self._terminal):
                self._say(f"{_name(number)}: the run saves its state and ends; a second one ends it immediately")
        elif now - self._first > SAME_S and not self.saved:
            self._end_at_once(f"another {_name(number)} came before the state was saved")

    def _end_at_once(self, why: str) -> NoReturn:
        if self.last_line is not None and status.is_first():
            before = f"; {Preempted.GO_ON_FROM_BEFORE}" if self.begun else ""
            self._say(self.last_line or f"{Preempted.opening(self.received)} {why}{before}")
        status.end(EXIT_CODE)
        os._exit(EXIT_CODE)

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            os.write(self._terminal, f"rlflow: {line}\n".encode())


def _is_ignored_hangup(number: int) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def _name(number: int) -> str:
    return signal.Signals(number).name


_mine: _Preemption | None = None


@contextmanager
def handled(until_exit: bool) -> Iterator[None]:
    """A context in which signals end the run in order, after a checkpoint; around all of `rlflow fit`, on every rank.

    Nested, or in another thread than the main one, it does nothing.

    Args:
        until_exit: Whether the process exits after the block. Then, if a signal ended the block, later ones are
            ignored while the process exits; else the previous handlers are set again.

    Raises:
        Preempted: A signal came before `begin`.
    """
    global _mine  # of the process, as signal handlers are
    if threading.current_thread() is not threading.main_thread() or _mine is not None:
        yield
        return
    _mine = mine = _Preemption()
    before = mine.begin()
    process, ends = os.getpid(), False
    try:
        yield
    except BaseException:
        ends = until_exit and (mine.raised or bool(mine.received))
        raise
    finally:
        if os.getpid() == process:
            signal.set_wakeup_fd(before.pop(0))
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if ends else handler or signal.SIG_DFL)
            if ends:  # the thread still watches that the process ends in time; the caller reports why
                mine.last_line = None
            else:
                mine.close()
            _mine = None


def is_handled() -> bool:
    """Whether signals are noted in this process."""
    return _mine is not None


def begin(grace_s: float) -> None:
    """From now on a signal raises nothing: the training loop polls `received` and ends by itself, after it has saved.

    Args:
        grace_s: Seconds from the first signal until the process is ended, whatever it does.

    Raises:
        Preempted: A signal has already come.
    """
    if _mine is not None:
        _mine.grace_s, _mine.begun = grace_s, True
        if _mine.received:
            raise Preempted(_mine.received, BEGINNING)


def received() -> int:
    """The number of the signal that asked this process, or by `agree` another rank, to end; 0 for none."""
    return 0 if _mine is None else _mine.received


def agree(number: int) -> None:
    """Note a signal that another rank received, so that all ranks end; called by each rank."""
    if _mine is not None:
        _mine.agree(number)


def saved(line: str) -> None:
    """Note that the checkpoint is complete: signals that still come are ignored.

    Args:
        line: The line for the terminal if the process does not end by itself within `grace_s`.
    """
    if _mine is not None:
        _mine.saved, _mine.last_line = True, line


def _forget() -> None:
    """Called in each forked child: set Python's default handlers, since the child is not a rank of the run."""
    global _mine
    if _mine is None:
        return
    _mine = None
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        if _is_ignored_hangup(number):
            continue
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget)
