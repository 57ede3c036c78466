"""Signals that ask a run to end: noted by each rank, agreed on where ranks meet, obeyed when the state is saved.

A signal handler of Python runs in the main thread, between two of its instructions, and so not while that waits for a
collective. So a thread of its own learns of signals, and ends the process when the time is over that the run was given.

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
    """What this process was asked, and what becomes of it.

    Attributes:
        received: The number of the signal that was first, here or on another rank; 0 for none.
        grace_s: Seconds from then to the end of the process, whatever it does.
        begun: Whether the run decides when it ends; else it ends at once.
        last_line: What the terminal reads at the end of that time; None where it has read it.
        saved: Whether the state is saved, and nothing is left to do but to end.
        raised: Whether the main thread was interrupted at once, which may be before the number is noted here.
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
        """Take the signals, but for a SIGHUP that `nohup` has had ignored; what handled them before."""
        taken = [number for number in SIGNALS if not _is_ignored_hangup(number)]
        before: dict[int, Any] = {number: signal.signal(number, self._handle) for number in taken}
        for number in taken:
            signal.siginterrupt(number, False)  # libraries need not begin a call anew
        before[0] = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread.start()
        return before

    def close(self) -> None:
        """End the thread, once signals go elsewhere."""
        os.write(self._writer, bytes([OVER]))  # closing would not do: children may have it open too
        self._thread.join()
        os.close(self._writer)
        os.close(self._reader)
        os.close(self._terminal)

    def agree(self, number: int) -> None:
        """Another rank received this signal."""
        if not self.received:
            os.write(self._writer, bytes([number]))
            while not self.received:
                time.sleep(0.001)

    def _handle(self, number: int, _: FrameType | None) -> None:
        """In the main thread."""
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
                self._say(f"{_name(number)}: the run saves its state and ends; a second one ends it at once")
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
    """Let signals end the run well within, in the main thread; in another one nothing changes.

    Args:
        until_exit: Whether the process ends after it: then it ignores signals that come while it does, if there was one
            before.

    Raises:
        Preempted: There was a signal before `begin`.
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
    """From here on the run decides when it ends.

    Args:
        grace_s: Seconds from a signal to the end of the process, whatever it does.

    Raises:
        Preempted: There was a signal before.
    """
    if _mine is not None:
        _mine.grace_s, _mine.begun = grace_s, True
        if _mine.received:
            raise Preempted(_mine.received, BEGINNING)


def received() -> int:
    """The number of the signal that this process, or by `agree` another rank, was asked by to end; 0 for none."""
    return 0 if _mine is None else _mine.received


def agree(number: int) -> None:
    """All ranks end, since one of them received this signal."""
    if _mine is not None:
        _mine.agree(number)


def saved(line: str) -> None:
    """The state is saved: signals that still come change nothing.

    Args:
        line: What the terminal reads, if the process does not end in time.
    """
    if _mine is not None:
        _mine.saved, _mine.last_line = True, line


def _forget() -> None:
    """In a process that was forked from this one: signals are its own."""
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
