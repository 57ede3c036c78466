"""Agents on vLLM: their calls are in one continuous batch, and who calls first changes no bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlflow.rollout import RolloutEngine, VLLMEngine
from tests.harness.episodes import played, running
from tests.rollout.trained import buckets, load, perturb, setup

SCHEDULES = 6


@pytest.fixture(scope="module")
def engine(policy: Path) -> Iterator[RolloutEngine]:
    engine, model = setup(VLLMEngine(kv_cache_gib=0.25, max_num_seqs=32), policy), load(policy)
    perturb(model, 0, scale=0.1)
    engine.update_weights(buckets(model), version=0)
    yield engine
    engine.close()


@pytest.mark.slow
def test_shuffled_schedules_give_equal_rows_and_logprobs_to_the_bit(engine: RolloutEngine) -> None:
    rows = [{"question": f"{place}+1=", "waits": 0.05} for place in range(2)]
    with running() as runner:
        first, *others = (played("branches", engine, rows, n=2, runner=runner) for _ in range(SCHEDULES))
    assert len(first.rows) == 4 * 6
    for other in others:
        assert other.rows == first.rows
