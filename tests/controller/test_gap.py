"""The alarm for wrong weights in the rollout engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlflow import UserError
from rlflow.controller.gap import GAP, LARGEST_GAP, LogprobGap, default_gap_limit
from rlflow.databuffer.transport import Transport
from rlflow.metrics import Metrics
from rlflow.values.ragged import Ragged
from rlflow.values.rollout import Rollout
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


def test_rows_that_an_older_policy_generated_are_not_compared() -> None:
    lengths = torch.tensor([2, 1])
    rollout = Rollout(
        prompt_ids=Ragged.from_lists([[1], [2]]),
        response_ids=torch.zeros(2, 2, dtype=torch.int64),
        loss_mask=torch.tensor([[True, True], [True, False]]),
        lengths=lengths,
        logprobs=torch.zeros(2, 2),
        finished=lengths > 0,
        group=torch.tensor([0, 1]),
        version=torch.tensor([2, 3]),
        versions=torch.tensor([[2, 3], [3, 0]], dtype=torch.int32),
        experts=Ragged.from_lists([[], []]),
        texts=["", ""],
        rows=[{}, {}],
    )
    metrics = Metrics()
    gap = LogprobGap(metrics, 0.001)
    gap.open(3)
    gap.observe(rollout, torch.tensor([[9.0, 9.0], [0.5, 9.0]]))
    assert metrics.reduce(Transport()) == {GAP: 0.5, LARGEST_GAP: 0.5}


def test_bfloat16_is_allowed_a_wider_gap() -> None:
    assert default_gap_limit(torch.bfloat16) > 0.02 > default_gap_limit(torch.float32)
