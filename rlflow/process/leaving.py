"""Ends a process that has nothing left to do, whatever code of the user's still runs in it."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable

from rlflow.errors import readable
from rlflow.process import status

EXIT_S = 10.0  # for threads, for processes of `multiprocessing` and for what runs at exit


_first: list[Callable[[], None]] = []


def before(function: Callable[[], None]) -> None:
    """Call a function, which has a limit of its own, before this process leaves; at its exit if it does not `leave`."""
    atexit.register(function)
    _first.append(function)


def leave(code: int) -> None:
    """From here on this process ends with `code` within `EXIT_S`; one that must be ended says what still runs.

    Python waits at its end for threads that are no daemons, and for processes of `multiprocessing`, without a limit.
    What is to be done `before` is done first.
    """
    while _first:
        function = _first.pop()
        atexit.unregister(function)
        function()
    threading.Thread(target=_end, args=(code,), daemon=True, name="leaving").start()


def _end(code: int) -> None:
    time.sleep(EXIT_S)
    line = f"{status.mine().named}: {_left()} still ran {EXIT_S:.0f} s after all was done; ended with it"
    print(f"rlflow: {readable(line)}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)


def _left() -> str:
    """What Python waits for."""
    import multiprocessing  # few processes need it

    processes = [process.name for process in multiprocessing.active_children() if not process.daemon]
    mine = (threading.current_thread(), threading.main_thread())
    threads = [each.name for each in threading.enumerate() if each not in mine and not each.daemon]
    named = [f"process {name}" for name in processes] + [f"thread {name}" for name in threads]
    return ", ".join(named) or "code that runs at exit"
