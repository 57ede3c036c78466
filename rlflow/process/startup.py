"""Measures the time before the first step: phases of this process, one after another."""

from __future__ import annotations

import gc
import time

import psutil

SHORTEST_S = 0.05  # a phase that takes less is not shown

_seconds: dict[str, float] | None = None  # of each phase; None where nothing is counted
_previous = 0.0  # when the previous phase ended, of `time.perf_counter`
_pauses_gc = False


def begin(of_process: bool = False) -> None:
    """Start counting time, unless it is counted already.

    Args:
        of_process: Count from the start of this process, which does nothing but a run. No garbage is collected until
            `collect_again`, for imports make millions of objects and no garbage; looking for it takes a third of their
            time.
    """
    global _seconds, _previous, _pauses_gc  # of the process
    if _seconds is not None:
        return
    _seconds, _previous, _pauses_gc = {}, time.perf_counter(), of_process
    if of_process:
        _previous -= time.time() - psutil.Process().create_time()
        gc.disable()


def passed(name: str) -> None:
    """End a phase called `name`, which began when the previous one ended; phases of one name are added up."""
    global _previous
    if _seconds is not None:
        began, _previous = _previous, time.perf_counter()
        _seconds[name] = _seconds.get(name, 0.0) + _previous - began


def set_aside() -> None:
    """Leave the objects that there are out of searches for garbage: vLLM starts three of them, which take seconds."""
    if _pauses_gc:
        gc.freeze()


def collect_again() -> None:
    """Collect garbage again, after models and engine are loaded."""
    if _pauses_gc:
        gc.enable()


def end() -> dict[str, float]:
    """End the count when the first step begins; returns the seconds of each phase."""
    global _seconds, _pauses_gc
    collect_again()
    counted, _seconds, _pauses_gc = _seconds or {}, None, False
    return counted


def line(seconds: dict[str, float]) -> str:
    """The phases as a line: `before step 1: 12.3 s (imports 3.1, config 0.4, ...)`."""
    parts = ", ".join(f"{name} {taken:.1f}" for name, taken in seconds.items() if taken >= SHORTEST_S)
    return f"before step 1: {sum(seconds.values()):.1f} s ({parts})"
