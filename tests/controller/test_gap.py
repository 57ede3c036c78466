"""The alarm for wrong weights in the rollout engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlflow import UserError
from rlflow.controller.gap import GAP, LogprobGap, default_gap_limit
from rlflow.metrics import Metrics
from tests.controller.runs import ZERO2, Fit, Lies, failing_fit, grpo, sums
from tests.ranks import RankPool


def test_an_engine_that_lies_about_its_weights_is_caught_in_the_step_that_it_generates_in(
    policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    run = Fit(grpo(policy), sums(12, prompts_per_step=3), tmp_path, ZERO2, Lies(), {"max_steps": 4})
    for result in ranks2.run(failing_fit, run):
        assert len(result.steps) == 1
        assert result.steps[0]["sync/logprob_gap"] < 1e-5
        assert "the rollout engine holds other weights than the trainer" in result.error
        assert "more than `trainer.logprob_gap_limit` = 0.001" in result.error
        assert "\n" not in result.error


@pytest.mark.parametrize("gap", [0.0011, float("nan"), float("inf")])
def test_a_gap_above_the_limit_ends_the_run_and_one_that_is_no_number_does(gap: float) -> None:
    alarm = LogprobGap(Metrics(), 0.001)
    alarm.check({GAP: 0.001})
    with pytest.raises(UserError, match="differ by"):
        alarm.check({GAP: gap})


def test_bfloat16_is_allowed_a_wider_gap() -> None:
    assert default_gap_limit(torch.bfloat16) > 0.02 > default_gap_limit(torch.float32)
