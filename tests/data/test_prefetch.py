"""The next draw is read ahead by one thread, which changes only the timing."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

from rlflow.data.loader import Loader, Prefetch
from rlflow.data.prompts import PromptData
from rlflow.errors import UserError
from rlflow.models.tiny import tiny_tokenizer
from tests.data.list_source import Listed

TOKENIZER = tiny_tokenizer()


class Slow(Listed):
    """Rows that take a while to read, each time another; notes how many were being read at once."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        super().__init__(rows)
        self.at_once = self.most_at_once = 0
        self.delay = 0.0

    def __getitem__(self, row: int) -> dict[str, Any]:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(random.random() * self.delay)
        self.at_once -= 1
        return super().__getitem__(row)


def slow(count: int, delay: float = 0.0) -> tuple[Slow, Loader]:
    """A loader of two prompts a draw, in the order of the rows, and its source, from which nothing was read so far."""
    source = Slow([{"question": str(row)} for row in range(count)])
    loader = Loader(source, PromptData(source, prompts_per_step=2, shuffle=False).resolved(), TOKENIZER, seed=0)
    source.reads, source.delay = [], delay
    return source, loader


def threads() -> int:
    return sum(thread.name.startswith("rlflow-prefetch") for thread in threading.enumerate())


def until(done: Any) -> None:
    deadline = time.monotonic() + 3
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_batches_are_the_loaders_own_whatever_the_timing() -> None:
    _, loader = slow(12, delay=0.003)
    draws = [0, 1, 2, 2, 5, 6, 3, 4, 5]  # some in order, some again, some skipped, and into the next epoch
    with Prefetch(loader, draws=None) as prompts:
        for draw in draws:
            batch, ids = prompts.batch(draw, 1, 2)
            time.sleep(random.random() * 0.006)
            expected, expected_ids = loader.batch(draw, 1, 2)
            assert batch.rows == expected.rows
            assert ids.tolist() == expected_ids.tolist()


def test_the_next_draw_is_read_before_it_is_asked_for() -> None:
    source, loader = slow(6)
    with Prefetch(loader, draws=3) as prompts:
        prompts.batch(0, 0, 1)
        until(lambda: source.reads == [0, 1, 2, 3])
        prompts.batch(1, 0, 1)
        until(lambda: source.reads == [0, 1, 2, 3, 4, 5])


def test_nothing_is_read_past_the_last_draw() -> None:
    source, loader = slow(6)
    with Prefetch(loader, draws=2) as prompts:
        prompts.batch(0, 0, 1)
        prompts.batch(1, 0, 1)
        time.sleep(0.05)
    assert source.reads == [0, 1, 2, 3]


def test_a_source_is_read_by_one_thread() -> None:
    source, loader = slow(12, delay=0.003)
    with Prefetch(loader, draws=None) as prompts:
        for draw in (0, 3, 1, 4):  # none is the one that was begun
            prompts.batch(draw, 0, 1)
    assert source.most_at_once == 1


def test_the_error_of_a_row_that_cannot_be_read_is_raised_when_it_is_asked_for() -> None:
    source, loader = slow(4)
    source.rows[3] = {"answer": "3"}
    with Prefetch(loader, draws=2) as prompts:
        assert len(prompts.batch(0, 0, 1)[1]) == 2
        with pytest.raises(UserError, match="listed, row 3 has changed since all rows were scanned"):
            prompts.batch(1, 0, 1)


def test_no_thread_is_left_nor_started_in_vain() -> None:
    source, loader = slow(6, delay=0.05)
    with Prefetch(loader, draws=3) as prompts:
        assert threads() == 0
        prompts.batch(0, 0, 1)
        assert threads() == 1
    assert threads() == 0
    read = len(source.reads)
    time.sleep(0.1)
    assert len(source.reads) == read
