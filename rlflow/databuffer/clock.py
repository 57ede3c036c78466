"""How long a rank waited: of the host, or of its device's stream.

On the CPU whoever waits for a collective stands still. On a GPU `Work.wait` returns at once, having asked the stream to
wait; so the stream's own time is taken, between two events on it, and read when the host waits for the device anyway.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

Done = Callable[[float, float], None]  # given when a wait began and ended, seconds of `time.perf_counter`


class Event(Protocol):
    """A point in a stream's work, as `torch.Event` is."""

    def record(self) -> None:
        """Put it behind what the stream was given so far."""

    def synchronize(self) -> None:
        """Return when the stream has come to it."""

    def elapsed_time(self, later: Any, /) -> float:
        """Milliseconds from it to a later one, when both are past."""


class Clock(ABC):
    """Takes the times of waits."""

    @abstractmethod
    @contextmanager
    def waiting(self, done: Done) -> Iterator[None]:
        """What is within it is a wait; `done` is called with it, at the latest by `settle`."""
        yield

    @abstractmethod
    def settle(self) -> None:
        """Tell of all waits so far."""


class HostClock(Clock):
    """Of a host that stands still while it waits."""

    @contextmanager
    def waiting(self, done: Done) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        done(begin, time.perf_counter())

    def settle(self) -> None:
        """Nothing: all was reported at once."""


class StreamClock(Clock):
    """Of a stream that stands still while the host goes on.

    A wait begins, on the host's clock, when the stream was asked to wait, and lasts as long as the stream stood still:
    from the end of the work before it.

    Args:
        event: Makes one of the current stream that keeps its time.
    """

    def __init__(self, event: Callable[[], Event]) -> None:
        self._event = event
        self._unread: list[tuple[float, Event, Event, Done]] = []

    @contextmanager
    def waiting(self, done: Done) -> Iterator[None]:
        begin, before, after = time.perf_counter(), self._event(), self._event()
        before.record()
        yield
        after.record()
        self._unread.append((begin, before, after, done))

    def settle(self) -> None:
        if self._unread:
            self._unread[-1][2].synchronize()
        for begin, before, after, done in self._unread:
            done(begin, begin + before.elapsed_time(after) / 1000)
        self._unread.clear()


def clock_of(device: torch.device) -> Clock:
    """The clock of the device that messages travel from."""
    if device.type != "cuda":
        return HostClock()
    return StreamClock(lambda: torch.Event(device, enable_timing=True))
