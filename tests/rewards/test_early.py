"""Calls in threads, and scores that begin before all responses are there."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import pytest

from rlflow.rewards import ByDataset, ExactMatch, RewardInput, SampleReward, WeightedSum
from rlflow.rewards.calls import RewardCalls
from rlflow.rewards.early import EarlyScores
from rlflow.rewards.http import HTTPReward


class Counts(SampleReward):
    """The length of a text; counts its calls, and how many of them ran at the same time."""

    def __init__(self, max_concurrent: int = 2, seconds: float = 0.01) -> None:
        super().__init__(max_concurrent=max_concurrent)
        self.seconds = seconds
        self.asked: list[str] = []
        self.most = self._running = 0
        self._lock = threading.Lock()

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        with self._lock:
            self.asked.append(text)
            self._running += 1
            self.most = max(self.most, self._running)
        time.sleep(self.seconds)
        with self._lock:
            self._running -= 1
        return float(len(text))


TEXTS = ["a", "ab", "abc", "abcd", "abcde", "abcdef"]
ROWS: list[dict[str, Any]] = [{"answer": "ab"}] * len(TEXTS)


def begun(reward: Any, places: list[int]) -> EarlyScores:
    """Early scores of the responses in these places, which ended in this order."""
    early = EarlyScores(reward, None)
    for place in places:
        early.add(place, TEXTS[place], ROWS[place], [])
    return early


def test_each_response_is_scored_once_in_its_place() -> None:
    reward = Counts()
    early = begun(reward, [4, 0, 5, 2])
    assert reward.score(RewardInput(TEXTS, ROWS, begun=early.taken)).total == [1, 2, 3, 4, 5, 6]
    assert sorted(reward.asked) == TEXTS
    assert (reward.most, early.unused) == (2, False)


def test_a_part_of_a_sum_is_scored_early_and_the_other_is_not() -> None:
    part = Counts()
    both = WeightedSum({"long": part, "right": ExactMatch()})
    early = begun(both, [3, 1])
    assert both.score(RewardInput(TEXTS, ROWS, begun=early.taken)).total == [1, 3, 3, 4, 5, 6]
    assert len(part.asked) == len(TEXTS)


def test_the_reward_of_a_dataset_scores_its_rows_early_and_each_once() -> None:
    own, part, batched = Counts(), Counts(), HTTPReward("http://127.0.0.1:9", batch=2)
    inner = ByDataset({"d": WeightedSum({"long": part}), "r": ExactMatch()}, column="answer")
    mixed = ByDataset({"a": own, "b": inner, "c": batched})
    rows = [{"dataset": name[0], "answer": name[1]} for name in ("bd", "a-", "br", "a-", "bd", "a-")]
    early = EarlyScores(mixed, None)
    for place in (5, 4, 2, 1):
        early.add(place, TEXTS[place], rows[place], [])
    until = time.monotonic() + 10
    while len(own.asked + part.asked) < 3 and time.monotonic() < until:
        time.sleep(0.001)
    assert (sorted(own.asked), part.asked) == (["ab", "abcdef"], ["abcde"])
    assert mixed.score(RewardInput(TEXTS, rows, begun=early.taken)).total == [1, 2, 0, 4, 5, 6]
    assert (sorted(own.asked), part.asked, early.unused) == (["ab", "abcd", "abcdef"], ["abcde", "a"], False)


def test_scores_of_a_datasets_responses_are_not_taken_for_others() -> None:
    mixed = ByDataset({"a": Counts(), "b": Counts()})
    rows = [{"dataset": name} for name in "abab"]
    early = EarlyScores(mixed, None)
    for place in (0, 2, 3):
        early.add(place, TEXTS[place], rows[place], [])
    others = ["a", "ab", "other", "abcd"]
    assert mixed.score(RewardInput(others, rows, begun=early.taken)).total == [1, 2, 5, 4]
    assert early.unused
    early.close()


@pytest.mark.parametrize(
    "others",
    [
        RewardInput(["a", "other", *TEXTS[2:]], ROWS),
        RewardInput(TEXTS[:3], ROWS[:3]),
        RewardInput(TEXTS, [ROWS[0], {"answer": "abc"}, *ROWS[2:]]),
        RewardInput(TEXTS, ROWS, prompt_column="answer"),
        RewardInput(TEXTS, ROWS, conversations=[[{"role": "user", "content": "a"}]] * 6),
    ],
    ids=["a text", "fewer", "a row", "a prompt", "messages"],
)
def test_scores_of_anything_else_are_not_taken(others: RewardInput) -> None:
    reward = Counts()
    early = begun(reward, [1, 5])
    assert early.taken(reward, others) is None
    assert not any(thread.name == "reward" for thread in threading.enumerate()), "calls that nobody reads go on"
    assert early.unused
    early.close()


def test_a_request_begins_when_all_of_its_responses_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[str]] = []
    reward = HTTPReward("http://127.0.0.1:9", batch=2)
    monkeypatch.setattr(reward, "_answer", lambda texts, rows: sent.append([*texts]) or [float(len(x)) for x in texts])
    early = begun(reward, [1, 2, 3])
    until = time.monotonic() + 10
    while not sent and time.monotonic() < until:
        time.sleep(0.001)
    assert sent == [["abc", "abcd"]]
    assert reward.score(RewardInput(TEXTS, ROWS, begun=early.taken)).total == [1, 2, 3, 4, 5, 6]
    assert sorted(sent) == [["a", "ab"], ["abc", "abcd"], ["abcde", "abcdef"]]


def test_calls_that_have_not_begun_are_cancelled_and_others_waited_for() -> None:
    ended: list[int] = []

    def call(place: int) -> None:
        time.sleep(0.05)
        ended.append(place)

    with RewardCalls(max_concurrent=2) as calls:
        futures = [calls.begin(place, partial(call, place)) for place in range(6)]
        time.sleep(0.02)
    assert sorted(ended) == [0, 1]
    assert [future.cancelled() for future in futures] == [False] * 2 + [True] * 4
    assert not any(thread.name == "reward" for thread in threading.enumerate())


def test_a_call_that_never_ends_does_not_hold_up_the_run_s_end() -> None:
    released = threading.Event()
    calls = RewardCalls(max_concurrent=1)
    calls.begin(0, released.wait)
    try:
        started = time.monotonic()
        calls.close(seconds=0.1)
        assert time.monotonic() - started < 5
        (thread,) = (each for each in threading.enumerate() if each.name == "reward")
        assert thread.daemon
    finally:
        released.set()
    thread.join()
