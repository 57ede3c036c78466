"""The alarm for wrong weights in the rollout engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow import UserError
from rlflow.controller.gap import GAP, LARGEST_GAP, SPREAD, SUMS, UNCERTAIN_GAP, LogprobGap, default_gap_limit
from rlflow.databuffer.transport import Transport
from rlflow.metrics import Metrics
from rlflow.values.path import RowPath
from rlflow.values.ragged import Ragged
from rlflow.values.rollout import Rollout
from tests.controller.runs import ZERO2, Fit, Lies, failing_fit, fit, grpo, sums
from tests.ranks import RankPool


def test_an_engine_that_lies_about_its_weights_is_caught_within_the_step(
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
def test_a_gap_that_is_above_the_limit_or_not_a_number_ends_the_run(gap: float) -> None:
    alarm = LogprobGap(0.001, torch.float32)
    alarm.check({GAP: 0.001})
    with pytest.raises(UserError, match="differ by"):
        alarm.check({GAP: gap})


def test_on_trial_a_gap_is_a_warning_unless_it_is_far_above_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    alarm = LogprobGap(None, torch.float32, trial=3)
    alarm.check({GAP: 0.002})
    assert "differ by 0.002 on average, more than" in caplog.text
    assert "For 2 more steps this is a warning" in caplog.text
    other = LogprobGap(None, torch.float32, trial=3)
    other.load_state_dict(json.loads(json.dumps(alarm.state_dict())))
    for far in (0.011, float("nan")):  # ten times 1e-3
        with pytest.raises(UserError, match="differ by"):
            other.check({GAP: far})
    for _ in range(2):
        alarm.check({GAP: 0.002})
    with pytest.raises(UserError, match=r"differ by 0\.002 on average"):
        alarm.check({GAP: 0.002})
    with pytest.raises(UserError, match="differ by"):
        LogprobGap(0.001, torch.float32, trial=3).check({GAP: 0.002})  # a limit that is set holds


def test_on_trial_an_unusual_gap_of_uncertain_tokens_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    sums = dict(zip(SUMS, (1000.0, 500.0, -1000.0, 2000.0, -1000.0, 2000.0), strict=True))
    alarm = LogprobGap(None, torch.bfloat16, trial=2)
    for gap in (0.01, 0.045):  # 3 + 20 / sqrt(500) times 0.01 is 0.039
        alarm.check({GAP: gap / 2, UNCERTAIN_GAP: gap} | sums)
    assert "differ by 0.045 for an uncertain token" in caplog.text
    with pytest.raises(UserError, match="uncertain token"):
        alarm.check({GAP: 0.045, UNCERTAIN_GAP: 0.2} | sums)


def test_a_fault_on_trial_is_still_one_after_it() -> None:
    sums = dict(zip(SUMS, (1000.0, 500.0, -1000.0, 2000.0, -1000.0, 2000.0), strict=True))
    alarm = LogprobGap(None, torch.bfloat16, trial=4)
    for gap in (0.01, 0.045, 0.045, 0.045):  # the last three are not a measure of what comes
        alarm.check({GAP: gap / 2, UNCERTAIN_GAP: gap} | sums)
    with pytest.raises(UserError, match=r"where they differed by 0\.01 in the steps before"):
        alarm.check({GAP: 0.045 / 2, UNCERTAIN_GAP: 0.045} | sums)


def test_rows_that_an_older_policy_generated_are_not_compared() -> None:
    lengths = torch.tensor([2, 1])
    rollout = Rollout(
        prompt_ids=Ragged.from_lists([[1], [2]]),
        response_ids=torch.zeros(2, 2, dtype=torch.int64),
        loss_mask=torch.tensor([[True, True], [True, False]]),
        lengths=lengths,
        logprobs=torch.zeros(2, 2),
        finished=lengths > 0,
        path=RowPath.of_groups(torch.tensor([0, 1])),
        version=torch.tensor([2, 3]),
        versions=torch.tensor([[2, 3], [3, 0]], dtype=torch.int32),
        ended=torch.zeros_like(lengths),
        texts=["", ""],
        rows=[{}, {}],
    )
    metrics = Metrics()
    gap = LogprobGap(0.001, torch.float32)
    gap.open(3, metrics.of(7))
    gap.observe(rollout, torch.tensor([[9.0, 9.0], [0.5, 9.0]]))
    reduced = metrics.reduce(7, Transport())
    assert {name: reduced[name] for name in (GAP, LARGEST_GAP)} == {GAP: 0.5, LARGEST_GAP: 0.5}
    copy = LogprobGap(0.001, torch.float32, counts=False)  # on a rank that has the same rows as another
    copy.open(3, metrics.of(8))
    copy.observe(rollout, torch.tensor([[9.0, 9.0], [0.5, 9.0]]))
    assert GAP not in metrics.reduce(8, Transport())


def test_bfloat16_is_allowed_a_wider_gap() -> None:
    assert default_gap_limit(torch.bfloat16) > 0.02 > default_gap_limit(torch.float32)


def _figures(gap: float, uncertain: float = 400.0, spread: float = 1.0) -> dict[str, float]:
    """Figures of a step whose 1,000 tokens have logprobs of mean 0 and, on the trainer's side, of variance 1."""
    sums = dict(zip(SUMS, (1000.0, uncertain, 0.0, 1000.0, 0.0, 1000.0 * spread**2), strict=True))
    return {GAP: gap * uncertain / 1000, UNCERTAIN_GAP: gap, **sums}


def test_a_gap_several_times_the_previous_ones_ends_the_run_below_the_limit() -> None:
    alarm = LogprobGap(None, torch.bfloat16)
    for gap in (0.002, 0.0024, 0.001, 0.0022):
        alarm.check(_figures(gap))
    alarm.check(_figures(0.0069))  # 3 times the median of 0.0021, and a little for the tokens being few
    with pytest.raises(UserError, match=r"differ by 0.009 for an uncertain token, which is more than 0\.00\d+, where"):
        alarm.check(_figures(0.009))
    alarm.check(_figures(0.009, uncertain=9))  # of few tokens it varies


def test_a_gap_is_compared_across_a_resume_if_dtype_and_engine_are_the_same() -> None:
    before, same = LogprobGap(None, torch.bfloat16, engine="A"), LogprobGap(None, torch.bfloat16, engine="A")
    for gap in (0.002, 0.0024, 0.001, 0.0022):
        before.check(_figures(gap))
    state = json.loads(json.dumps(before.state_dict()))
    same.load_state_dict(state)
    with pytest.raises(UserError, match=r"they differed by 0\.0021 in the steps before"):
        same.check(_figures(0.009))
    for other in (LogprobGap(None, torch.bfloat16, engine="B"), LogprobGap(None, torch.float16, engine="A")):
        other.load_state_dict(state)
        other.check(_figures(0.009))


def test_a_checkpoint_has_the_gaps_of_the_steps_before(policy: Path, tmp_path: Path) -> None:
    def gaps(done: int, **settings: Any) -> list[list[float]]:
        fit(Fit(grpo(policy), sums(12, prompts_per_step=3), tmp_path, settings={"max_steps": done, **settings}))
        stored = json.loads((tmp_path / f"checkpoint/step-{done:08d}/state.json").read_text())
        found: list[list[float]] = stored["state"]["gaps"]["actor"]["steps"]
        return found

    two = gaps(2, save_every_n_steps=2)
    assert len(two) == 2
    three = gaps(3, save_every_n_steps=1, ckpt_path="last")
    assert three[:2] == two
    assert len(three) == 3


def test_a_gap_from_rounding_is_not_a_fault_however_small_it_was_before() -> None:
    alarm = LogprobGap(None, torch.bfloat16)
    for gap in (0.0, 0.0009):
        alarm.check(_figures(gap))


def test_logprobs_that_spread_otherwise_end_the_run_in_its_first_step() -> None:
    LogprobGap(None, torch.bfloat16).check(_figures(0.002, spread=0.96))
    with pytest.raises(UserError, match=r"the engine's spread 0.91 times as much as the trainer's"):
        LogprobGap(None, torch.bfloat16).check(_figures(0.002, spread=0.91))


def test_a_limit_that_is_set_is_the_only_one() -> None:
    alarm = LogprobGap(1.0, torch.bfloat16)
    for gap in (0.002, 0.2):
        alarm.check(_figures(gap, spread=0.5))


def test_loggers_see_the_spread_and_not_what_it_is_made_of() -> None:
    figures = _figures(0.002, spread=0.99)
    LogprobGap(None, torch.bfloat16).check(figures)
    assert figures == {GAP: 0.0008, UNCERTAIN_GAP: 0.002, SPREAD: pytest.approx(0.99)}


def test_certain_tokens_do_not_dilute_the_gap_of_the_uncertain() -> None:
    metrics = Metrics()
    alarm = LogprobGap(None, torch.bfloat16)
    # probabilities 1/4 and 1: the first is off by 0.03, and counts 3/4
    trainer = torch.tensor([[0.25, 1.0]]).log()
    alarm.record(metrics.of(0), trainer, trainer + torch.tensor([[0.03, 0.0]]), torch.tensor([[True, True]]))
    assert metrics.reduce(0, Transport())[UNCERTAIN_GAP] == pytest.approx(0.04)
