"""Rewards that misbehave in workers: no hang, the policy honoured, counted, and nothing left over."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rlflow.errors import UserError
from rlflow.rewards import CallableReward, RewardInput

pytestmark = pytest.mark.row("rewards and environments")

SECONDS = 2.0
OVER = 5.0  # seconds by which a call may end later
KINDS = {
    "raises": "KeyError",
    "raises_long": "after megabytes",
    "sleeps": "took longer than 2 s",
    "spins_in_c": "took longer than 2 s",
    "nan": "it returned nan",
    "infinite": "it returned inf",
    "none": "it returned None, not a number",
    "text": "it returned '1', not a number",
    "several": "it returned [1.0, 2.0], not a number",
    "exits": "SystemExit",
    "leaves": "ended its process with code 0",
    "takes_memory": "MemoryError",
    "starts_children": "took longer than 2 s",
    "prints": "after 100 MB",
}
CHEAP = ("spins_in_c",)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in CHEAP else pytest.mark.slow) for kind in KINDS]
)
def test_a_reward_that_misbehaves_costs_its_sample_or_ends_the_run_in_a_line(
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    counted: Callable[[str], None],
    measured: Callable[[str, float], None],
) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    before = {process.pid for process in psutil.process_iter()}
    path, texts, rows = f"bad_rewards.{kind}", ["a", "x", "b"], [{}] * 3
    zero = CallableReward(path, on_error="zero", timeout_s=SECONDS, memory_mb=2048)
    zero.score(RewardInput(["a"], [{}]))  # the worker starts
    began = time.monotonic()
    scores = zero.score(RewardInput(["x"], [{}]))
    took = time.monotonic() - began
    assert took < SECONDS + OVER
    assert (scores.total, scores.failed) == ([0.0], {0: "zero"})
    drops = CallableReward(path, on_error="drop", timeout_s=SECONDS, memory_mb=2048)
    scores = drops.score(RewardInput(texts, rows))
    assert (scores.total, scores.failed) == ([1.0, 0.0, 1.0], {1: "drop"})
    ends = CallableReward(path, timeout_s=SECONDS, memory_mb=2048)
    with pytest.raises(UserError) as told:
        ends.score(RewardInput(texts, rows))
    assert f"reward `{path}` failed on sample 1 with " in str(told.value)
    assert KINDS[kind] in str(told.value)
    assert "\n" not in str(told.value)
    assert len(str(told.value)) < 1000
    del zero, drops, ends
    left = [process for process in psutil.process_iter() if process.pid not in before and sleeps(process)]
    assert left == []
    counted("rewards that misbehave: counted as 0, dropped, or the run ended, as asked for")
    measured(f"a reward of {SECONDS:.0f} s ended after {{:.1f}} s", took)


def sleeps(process: psutil.Process) -> bool:
    """Whether it is one that `starts_children` started."""
    try:
        return "time.sleep(600)" in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
