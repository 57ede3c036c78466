"""Waits are timed where the host does not stand still for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlflow.databuffer.balance import Balance
from rlflow.databuffer.buffer import DataBuffer
from rlflow.databuffer.rows import RowSpace
from rlflow.databuffer.transport import Clock, Transport
from rlflow.values.column_kinds import PerSample
from rlflow.values.layout import Layout
from tests.ranks import RankPool


class Stream:
    """A device's stream: the host gives it work and goes on. Times are in seconds."""

    def __init__(self) -> None:
        self.busy_until = 0.0
        self.synchronized = 0

    def event(self) -> Event:
        return Event(self)


class Event:
    """A point in the stream's work."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.at = -1.0

    def record(self) -> None:
        self.at = self._stream.busy_until

    def synchronize(self) -> None:
        self._stream.synchronized += 1

    def elapsed_time(self, later: Any) -> float:
        return float(later.at - self.at) * 1000


class OrdersTheStream:
    """A `Work` whose `wait` returns at once, as NCCL's does: the stream stands still for it.

    Args:
        work: Work that real ranks do.
        stream: Stream that is made to wait.
        seconds: Seconds of the wait.
    """

    def __init__(self, work: Any, stream: Stream, seconds: float) -> None:
        self._work, self._stream, self._seconds = work, stream, seconds

    def wait(self) -> None:
        self._work.wait()
        self._stream.busy_until += self._seconds


class OverAStream(Transport):
    """Transport whose collectives take a quarter of a second of the stream's time, and none of the host's."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.clock = Clock(stream.event)
        self._stream = stream

    def all_to_all(self, *arguments: Any) -> Any:
        received, work = super().all_to_all(*arguments)
        return received, OrdersTheStream(work, self._stream, 0.25)


class Noted:
    """Notes how long waits were."""

    def __init__(self) -> None:
        self.waits: dict[str, float] = {}

    def wait(self, name: str, start: float, end: float) -> None:
        self.waits[name] = end - start

    def flight(self, name: str, start: float, end: float) -> None: ...


def _exchanged() -> tuple[float, float, dict[str, float], int]:
    """The waits of an exchange before and after they are settled, what was noted, and how often the host waited."""
    stream = Stream()
    transport, noted = OverAStream(stream), Noted()
    made, read = Layout((0,), 1), Layout((1,), 1, "balanced")
    rows = torch.tensor([[0, 1], [0, 1], [3, 4], [3, 4], [0, 0], [1, 1]])
    buffer = DataBuffer(transport)
    space = RowSpace.of_shards("rollout", made, [rows]).at(balance=Balance("off"))
    transport.form_groups([(0, 1)])
    transport.watch = noted
    stream.busy_until = 7.0  # of work that the exchange waits behind, which is not a wait
    buffer.put("rewards", torch.ones(2) if transport.rank == 0 else None, PerSample, space, made)
    buffer.issue("rewards", read)
    if transport.rank == 1:
        buffer.get("rewards", read)
    buffer.clear()
    before = buffer.waited_s
    transport.clock.settle()
    return before, buffer.waited_s, noted.waits, stream.synchronized


def test_a_wait_of_the_stream_is_timed_though_work_returns_immediately(ranks2: RankPool) -> None:
    for before, waited, noted, synchronized in ranks2.run(_exchanged):
        assert before == 0.0  # not known yet, and nothing waited to know it
        assert waited >= 0.25
        assert waited == pytest.approx(0.25 * round(waited / 0.25))
        assert noted
        assert synchronized == 1


def test_each_wait_is_reported_once() -> None:
    stream, told = Stream(), []
    clock = Clock(stream.event)
    with clock.waiting(lambda begin, end: told.append(end - begin)):
        stream.busy_until += 2.0
    clock.settle()
    clock.settle()
    assert told == [pytest.approx(2.0)]
    assert stream.synchronized == 1
