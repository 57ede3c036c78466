"""Where the time before the first step goes: phases of this process, one after another."""

from __future__ import annotations

import gc
import time

import psutil

SHORTEST_S = 0.05  # a phase that takes less is not shown


class Startup:
    """The seconds of the phases so far.

    Args:
        began: When the first one began, of `time.perf_counter`.
        pauses_gc: Whether Python looks for no garbage meanwhile.

    Attributes:
        seconds: How long each phase took; a name that comes again is counted once.
    """

    def __init__(self, began: float, pauses_gc: bool = False) -> None:
        self.pauses_gc = pauses_gc
        self.seconds: dict[str, float] = {}
        self._at = began

    def passed(self, name: str) -> None:
        """What was done since the previous phase was `name`."""
        began, self._at = self._at, time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + self._at - began

    def line(self) -> str:
        """Such as `before step 1: 12.3 s (imports 3.1, config 0.4, ...)`."""
        parts = ", ".join(f"{name} {taken:.1f}" for name, taken in self.seconds.items() if taken >= SHORTEST_S)
        return f"before step 1: {sum(self.seconds.values()):.1f} s ({parts})"


def _process_began() -> float:
    """When this process was started, of `time.perf_counter`."""
    return time.perf_counter() - (time.time() - psutil.Process().create_time())


_mine: Startup | None = None


def begin(of_process: bool = False) -> None:
    """From here on time is counted, unless it is already.

    Args:
        of_process: From when this process was started: all that it does is a run. No garbage is collected until
            `collect_again`, for imports make millions of objects and no garbage; looking for it takes a third of their
            time.
    """
    global _mine  # of the process
    if _mine is None:
        _mine = Startup(_process_began() if of_process else time.perf_counter(), pauses_gc=of_process)
        if of_process:
            gc.disable()


def passed(name: str) -> None:
    """See `Startup.passed`; nothing is counted where nothing has begun."""
    if _mine is not None:
        _mine.passed(name)


def collect_again() -> None:
    """Models and engine are there: garbage is collected from now on."""
    if _mine is not None and _mine.pauses_gc:
        gc.enable()


def end() -> Startup:
    """The first step begins: what has been counted. The next run of this process counts anew."""
    global _mine
    collect_again()
    counted, _mine = _mine, None
    return counted or Startup(time.perf_counter())
