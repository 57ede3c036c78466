"""The rewards of an algorithm: verifiers, reward models, penalties, and KL whose weight adapts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlflow import CausalLM, PerSample, RewardModel, Rollout
from rlflow.algorithms import GRPO, PPO
from rlflow.functional import KL
from rlflow.models.optimizer import Optimizer
from rlflow.models.tiny import write_tiny_model
from tests.controller.runs import SGD, ZERO2, Fit, OddCharacters, Result, failing_fit, fit, grpo, sums
from tests.controller.test_ranks import difference
from tests.ranks import RankPool


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("policy"), seed=1, hidden_size=64, intermediate_size=96, layers=2)


@pytest.fixture(scope="module")
def judge(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with a random head."""
    folder = tmp_path_factory.mktemp("judge")
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def mixed(
    policy: Path, judge: Path, tmp_path_factory: pytest.TempPathFactory, ranks2: RankPool
) -> tuple[Result, list[Result]]:
    """Two steps of GRPO with all sources of reward, on one rank and on two."""
    folder = tmp_path_factory.mktemp("mixed")

    def run(name: str, **given: object) -> Fit:
        module = grpo(
            policy, reward_model=RewardModel(str(judge)), reward_model_coef=0.5, overlong_buffer=8, optimizer=SGD
        )
        return Fit(module, sums(6, 3), folder / name, settings={"max_steps": 2}, **given)  # type: ignore[arg-type]

    return fit(run("1")), ranks2.run(fit, run("2", strategy=ZERO2))


def test_verifier_reward_model_and_penalty_add_up(mixed: tuple[Result, list[Result]]) -> None:
    for step in mixed[0].steps:
        assert abs(step["reward/model"]) > 0.01
        assert step["reward/overlong"] < -0.1
        expected = step["reward/mean"] + 0.5 * step["reward/model"] + step["reward/overlong"]
        assert step["reward/outcome"] == pytest.approx(expected, rel=1e-6)


class Broken(GRPO):
    """GRPO whose reward model has no score for the last prompt's second response."""

    def model_scores(self, rollout: Rollout) -> PerSample:
        scores = super().model_scores(rollout)
        return scores.where((rollout.group != 1) | (torch.arange(len(scores)) % 2 == 0), torch.nan)


def test_a_score_that_is_not_finite_is_named_by_its_row_on_every_rank(
    policy: Path, judge: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    module = Broken(CausalLM(str(policy)), reward_model=RewardModel(str(judge)), group_size=2, max_response_length=4)
    run = Fit(module, sums(2, 2), tmp_path / "run", strategy=ZERO2)  # one prompt for each rank
    errors = [result.error for result in ranks2.run(failing_fit, run)]
    assert errors[0] == errors[1]
    assert "`rewards` is infinite or NaN for sample 1 of prompt 1" in errors[0]


def test_mixed_rewards_are_the_same_for_any_number_of_ranks(mixed: tuple[Result, list[Result]]) -> None:
    alone, both = mixed
    for result in both:
        assert difference(result.weights, alone.weights) < 1e-6
        assert result.steps[1]["reward/model"] == pytest.approx(alone.steps[1]["reward/model"], rel=1e-5)


def test_the_weight_of_kl_adapts_alike_on_every_rank(policy: Path, tmp_path: Path, ranks2: RankPool) -> None:
    def run(name: str, **given: object) -> Fit:
        module = PPO(
            CausalLM(str(policy), optimizer=Optimizer("adamw", lr=3e-3)),
            OddCharacters(),
            group_size=4,
            max_response_length=6,
            kl=KL(0.1, target=1e-4, horizon=80.0),
        )
        return Fit(module, sums(6, 2), tmp_path / name, settings={"max_steps": 3}, **given)  # type: ignore[arg-type]

    alone = [step["actor/kl_coef"] for step in fit(run("1")).steps]
    # The policy is its reference in the first step, which adapts nothing, and far from it after: 8 samples a step over
    # a horizon of 80, errors counted up to 20%.
    assert alone == pytest.approx([0.1, 0.1, 0.1 * 1.02], rel=1e-6)
    for result in ranks2.run(fit, run("2", strategy=ZERO2)):
        assert [step["actor/kl_coef"] for step in result.steps] == pytest.approx(alone, rel=1e-6)


def test_a_cut_response_is_left_out_of_the_loss_and_stays_in_the_baseline(policy: Path, tmp_path: Path) -> None:
    # No response ends within two tokens, so every one is cut: nothing is trained on, though rewards differ.
    module = grpo(policy, mask_truncated=True, max_response_length=2)
    module.stop_token_ids = ()
    (step,) = fit(Fit(module, sums(4, 2), tmp_path / "run")).steps
    assert step["rollout/truncated"] == 1.0
    assert step["reward/mean"] > 0
    assert "actor/loss" not in step
