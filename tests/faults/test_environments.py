"""Environments that misbehave in workers: no hang, the policy honoured, and nothing left over."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlflow.errors import UserError, shown
from rlflow.models.tiny import write_tiny_model
from rlflow.rollout import RolloutEngine, TransformersEngine
from rlflow.rollout.conversation import Conversation
from rlflow.values.rollout import Ending
from rlflow.worker import Limits, Worker
from tests.faults.test_rewards import KINDS, OVER, SECONDS, sleeps
from tests.rollout.test_conversation_turns import held
from tests.rollout.trained import buckets, load, setup

pytestmark = pytest.mark.row("rewards and environments")

ROWS = [{"bad": False}, {"bad": True}, {"bad": False}]
TOLD = KINDS | {
    "nan": "gave the reward nan",
    "infinite": "gave the reward inf",
    "none": "gave the reward None",
    "text": "gave the reward '1'",
    "several": "gave the reward [1.0, 2.0]",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", layers=1, max_position=512)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[RolloutEngine]:
    engine = setup(TransformersEngine(), model)
    engine.update_weights(buckets(load(model)), 0)
    yield engine
    engine.close()


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "none" else pytest.mark.slow) for kind in KINDS]
)
def test_a_misbehaving_environment_costs_its_conversation_or_ends_the_run(
    kind: str,
    engine: RolloutEngine,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    counted: Callable[[str], None],
    measured: Callable[[str, float], None],
) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    before = {process.pid for process in psutil.process_iter()}

    def conversations(on_failure: str) -> list[Conversation]:
        hosts = [Worker(Limits(timeout_s=SECONDS, memory_mb=2048)) for _ in ROWS]
        given: Any = {"rows": ROWS, "hosts": hosts, "on_failure": on_failure}
        try:
            return held(engine, tokenizer, f"bad_environments.{kind}", range(3), **given)  # type: ignore[arg-type]
        finally:
            for host in hosts:
                host.close()

    took = 0.0
    for on_failure in ("zero", "mask"):
        began = time.monotonic()
        found = conversations(on_failure)
        took = max(took, time.monotonic() - began)
        assert [(each.ended, each.rewards) for each in found] == [
            (Ending.DONE, [1.0]),
            (Ending.FAILED, [0.0]),
            (Ending.DONE, [1.0]),
        ]
        assert [any(each.written) for each in found] == [True, on_failure == "zero", True]
    with pytest.raises(UserError) as told:
        conversations("raise")
    assert f"the environment `bad_environments.{kind}` failed at turn 1: " in str(told.value)
    assert TOLD[kind] in str(told.value)
    assert "turn 0" not in str(told.value)  # both parts of the line count from 1
    assert "\n" not in str(told.value)
    assert len(shown(str(told.value))) < (1000 if kind != "raises_long" else 5000)
    assert took < SECONDS + OVER
    assert [process for process in psutil.process_iter() if process.pid not in before and sleeps(process)] == []
    counted("environments that misbehave: 0, left out, or the run ended")
    measured(f"conversations of {SECONDS:.0f} s a call ended after {{:.1f}} s", took)
