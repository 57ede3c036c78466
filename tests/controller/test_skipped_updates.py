"""Updates that must not happen."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlflow import Batch, CausalLM, PerSample, PerToken, UserError, node
from rlflow.algorithms import SFT
from rlflow.strategies import FSDPStrategy
from tests.controller.runs import (
    SGD,
    ZERO2,
    ZERO3,
    Fit,
    NotFinite,
    RecordingSFT,
    Result,
    TwoTrained,
    Unmasked,
    answers,
    failing_fit,
    fit,
)
from tests.ranks import RankPool

LENGTHS = (3, 9, 1, 12)


@pytest.fixture(scope="module")
def start(policy: Path) -> dict[str, Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).named_parameters())


def unchanged(result: Result, start: dict[str, Tensor]) -> bool:
    return all(torch.equal(result.weights[name], start[name]) for name in start)


def test_a_step_in_which_no_token_counts_changes_nothing(
    policy: Path, start: dict[str, Tensor], tmp_path: Path, ranks2: RankPool
) -> None:
    for result in ranks2.run(
        fit, Fit(Unmasked(CausalLM(str(policy), optimizer=SGD)), answers(LENGTHS, 4), tmp_path, ZERO2)
    ):
        assert unchanged(result, start)
        assert "actor/loss" not in result.steps[0]


@pytest.mark.parametrize("strategy", [ZERO2, ZERO3])
def test_one_rank_s_nan_update_is_skipped_by_all_and_three_in_a_row_end_the_run(
    strategy: object, policy: Path, start: dict[str, Tensor], tmp_path: Path, ranks2: RankPool
) -> None:
    module = NotFinite(str(policy), range(5))
    run = Fit(module, answers(LENGTHS, 4), tmp_path, strategy, settings={"max_steps": 5})  # type: ignore[arg-type]
    for result in ranks2.run(failing_fit, run):
        assert [step["actor/skipped_updates"] for step in result.steps] == [1, 1]
        assert "the gradient of `actor` was infinite or NaN in 3 updates in a row" in result.error
        assert "\n" not in result.error
        assert unchanged(result, start)


def _skipping(module: NotFinite, folder: Path) -> Fit:
    return Fit(module, answers(LENGTHS, 4), folder, settings={"max_steps": 5})


def test_in_float16_a_gradient_that_is_nan_at_every_scale_ends_the_run(
    policy: Path, start: dict[str, Tensor], tmp_path: Path, ranks2: RankPool
) -> None:
    module = NotFinite(str(policy), range(20))
    strategy, settings = partial(FSDPStrategy, precision="fp16"), {"max_steps": 20}
    run = Fit(module, answers(LENGTHS, 4), tmp_path, strategy, settings=settings)
    for result in ranks2.run(failing_fit, run):
        scales = [step["actor/loss_scale"] for step in result.steps]
        # 14 halvings from 2^14 to 1, and at 1 two more updates before the third
        assert scales == [2.0**power for power in range(13, -1, -1)] + [1.0]
        assert "the gradient of `actor` was infinite or NaN in 3 updates in a row" in result.error


def test_a_finite_update_starts_the_count_of_skipped_ones_again(policy: Path, tmp_path: Path) -> None:
    steps = fit(_skipping(NotFinite(str(policy), (0, 1, 3, 4)), tmp_path)).steps
    assert ["actor/skipped_updates" in step for step in steps] == [True, True, False, True, True]


def test_skipped_updates_are_counted_for_each_role_by_itself(policy: Path, tmp_path: Path) -> None:
    result = failing_fit(_skipping(TwoTrained(str(policy), range(5)), tmp_path))
    assert len(result.steps) == 2
    assert all("other/grad_norm" in step for step in result.steps)


class _WrongShape(SFT):
    @node(role="actor", type="train")
    def actor_loss(self, batch: Batch) -> PerToken:
        return -self.actor.logprobs(batch).sum(dim=1)


def test_a_loss_of_another_shape_than_annotated_is_refused(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train node `actor_loss` returned a loss of shape \[4\] for \[4, 13\]"):
        fit(Fit(_WrongShape(CausalLM(str(policy))), answers(LENGTHS, 4), tmp_path))


class _PerSample(SFT):
    @node(role="actor", type="train")
    def actor_loss(self, batch: Batch) -> PerSample:
        return -self.actor.logprobs(batch).sum(dim=1)


def test_a_loss_per_sample_is_averaged_over_samples(policy: Path, tmp_path: Path) -> None:
    data = answers(LENGTHS, 4)
    per_sample = fit(Fit(_PerSample(CausalLM(str(policy), optimizer=SGD)), data, tmp_path / "a"))
    summed = fit(
        Fit(SFT(CausalLM(str(policy), optimizer=SGD), loss_aggregation="sequence-mean-token-sum"), data, tmp_path / "b")
    )
    assert per_sample.steps[0]["actor/loss"] == pytest.approx(summed.steps[0]["actor/loss"], rel=1e-6)


class _CallsInTraining(RecordingSFT):
    called = ""

    @node(role="actor", type="train")
    def actor_loss(self, batch: Batch, numbers: PerSample) -> PerToken:
        getattr(self, self.called)(numbers.double())
        return -self.actor.logprobs(batch)


@pytest.mark.parametrize("helper", ["mean", "whiten", "all_rows"])
def test_helpers_over_all_rows_are_refused_in_a_train_node(helper: str, policy: Path, tmp_path: Path) -> None:
    module = _CallsInTraining(str(policy))
    module.called = helper
    result = failing_fit(Fit(module, answers(LENGTHS, 4), tmp_path))
    assert result.error.startswith("train node `actor_loss` calls for ")
    assert "\n" not in result.error
