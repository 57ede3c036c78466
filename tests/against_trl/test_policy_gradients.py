"""Advantages, loss and gradient of a step equal those of TRL's own trainers, for the same weights and tokens.

What both compute alike has other names and defaults in TRL:

- Advantages are divided by the group's standard deviation plus 1e-4 (here 1e-6); both are tiny against the rewards.
- `delta` is `dual_clip`; `epsilon` and `epsilon_high` are `clip_low` and `clip_high`, but CISPO's `epsilon_high` is the
  largest weight, here `1 + clip_high`.
- `loss_type` chooses the denominator: `dapo` and `bnpo` are `token-mean`, `grpo` is `sequence-mean-token-mean`,
  `dr_grpo` is `constant`. TRL's own default is `dapo`.
- The gap between sampler and trainer is corrected only where TRL's vLLM samples, by default with `sequence_mask` and 3
  (here `token`, `truncate` and 2).
- GRPO's KL in TRL is k3 times the ratio, which is k3-ratio, the default; `use_bias_correction_kl=False` is k3 alone.
  RLOO's, in the reward, is k1 summed over the response in both.
- RLOO's ratio is one of whole responses in TRL, so its loss at the first update is the mean advantage; here it is of
  tokens, and `sequence-mean-token-sum` gives the same gradient there. Later both are the same with TRL's ratio.
- TRL computes logprobs and advantages in float32 also where the model is in float64: hence the tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

from rlflow import PerSample, PerToken, Rollout
from rlflow.algorithms import CISPO, GRPO, GSPO, RLOO, DrGRPO, PolicyGradient
from rlflow.functional import Importance, ppo_clip_loss
from tests.against_trl import rlflow_nodes
from tests.against_trl.cases import GROUP, LONGEST, TEMPERATURE, TOLERANCE, Models, Result, gradient_distance
from tests.against_trl.conftest import TheirResult
from tests.algorithm_factory import made

pytestmark = pytest.mark.slow
OFF_POLICY = {"epochs": 2}  # here and in TRL the setting with which old logprobs are computed


@dataclass(frozen=True)
class Case:
    """One step that both libraries can do: the settings of each."""

    algorithm: type[PolicyGradient]
    ours: dict[str, Any]
    theirs: dict[str, Any]
    off_policy: bool = True
    vllm: bool = False


CASES = {
    "the first update": Case(GRPO, {}, {"loss_type": "dapo", "beta": 0.0}, off_policy=False),
    "a later update, with clip-higher": Case(GRPO, {"clip_high": 0.28}, {"loss_type": "bnpo", "epsilon_high": 0.28}),
    "KL to the reference, means of sequences": Case(
        GRPO,
        {"kl_coef": 0.3, "loss_aggregation": "sequence-mean-token-mean"},
        {"loss_type": "grpo", "beta": 0.3},
    ),
    "KL to the reference, without its ratio": Case(
        GRPO,
        {"kl_coef": 0.3, "kl_kind": "k3", "loss_aggregation": "sequence-mean-token-mean"},
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False},
    ),
    "the first update, with the gradient of KL": Case(
        GRPO, {"kl_coef": 0.3, "kl_kind": "k3+"}, {"loss_type": "dapo", "beta": 0.3}, off_policy=False
    ),
    "dual clip": Case(GRPO, {"dual_clip": 1.5}, {"loss_type": "dapo", "delta": 1.5}),
    "truncated importance weights": Case(
        GRPO,
        {"importance": Importance("token", "truncate", high=1.2), "kl_coef": 0.1, "kl_kind": "k3"},
        {
            "loss_type": "dapo",
            "beta": 0.1,
            "use_bias_correction_kl": False,
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": 1.2,
        },
        vllm=True,
    ),
    "masked importance weights of sequences": Case(
        GRPO,
        {"importance": Importance("sequence", "mask", low=0.7, high=1.5)},
        {
            "loss_type": "dapo",
            "vllm_importance_sampling_mode": "sequence_mask",
            "vllm_importance_sampling_clip_min": 0.7,
            "vllm_importance_sampling_clip_max": 1.5,
        },
        vllm=True,
    ),
    "Dr. GRPO": Case(DrGRPO, {}, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "CISPO": Case(CISPO, {"clip_high": 0.1}, {"loss_type": "cispo", "epsilon_high": 1.1}),
    "GSPO": Case(
        GSPO,
        {"clip_low": 0.01, "clip_high": 0.02},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.01,
            "epsilon_high": 0.02,
        },
    ),
}


@pytest.fixture(scope="module")
def rollout(models: Models) -> Rollout:
    """The recorded responses."""
    return rlflow_nodes.recorded_rollout(models)


def step(case: Case, models: Models, rollout: Rollout) -> Result:
    """rlflow's results for the step."""
    common = {"group_size": GROUP, "max_response_length": LONGEST, "temperature": TEMPERATURE, "importance": None}
    settings = common | (OFF_POLICY if case.off_policy else {}) | case.ours
    module = made(case.algorithm, models.old, rlflow_nodes.Points(), **settings)
    start = {"actor": models.old, "reference": models.reference}
    return rlflow_nodes.step(module, {"rollout": rollout}, start, models.policy if case.off_policy else models.old)


@pytest.fixture(scope="module", params=CASES)
def grpo(request: pytest.FixtureRequest, models: Models, rollout: Rollout, trl: TheirResult) -> tuple[Result, Result]:
    """Ours, and theirs by `GRPOTrainer`."""
    case = CASES[request.param]
    sampler = rollout.logprobs if case.vllm else None
    theirs = trl("grpo", models, off_policy=case.off_policy, sampler=sampler, **case.theirs)
    return step(case, models, rollout), theirs


class TestGRPOTrainer:
    def test_advantages_are_equal(self, grpo: tuple[Result, Result]) -> None:
        mine, theirs = (result.advantages for result in grpo)
        assert_equal_advantages(mine, theirs)

    def test_the_loss_is_equal(self, grpo: tuple[Result, Result]) -> None:
        mine, theirs = grpo
        assert mine.loss == pytest.approx(theirs.loss, rel=TOLERANCE)

    def test_the_gradient_is_equal(self, grpo: tuple[Result, Result]) -> None:
        assert gradient_distance(*grpo) < TOLERANCE


class WholeResponses(RLOO):
    """RLOO with TRL's ratio, which is of the whole response."""

    def surrogate(self, logprobs: PerToken, old_logprobs: PerToken, advantages: PerSample, mask: PerToken) -> PerSample:
        whole, old = ((x * mask).sum(dim=1) for x in (logprobs, old_logprobs))
        return ppo_clip_loss(whole, old, advantages, self.clip.low, self.clip.high)


KL_IN_REWARD = {"kl_coef": 900.0}  # the rewards are 10,000
RLOO_CASES = {
    "the first update": Case(
        RLOO, {"loss_aggregation": "sequence-mean-token-sum", **KL_IN_REWARD}, {"beta": 900.0}, off_policy=False
    ),
    "a later update, with its ratio": Case(
        WholeResponses, {"loss_aggregation": "sequence-mean-token-mean", **KL_IN_REWARD}, {"beta": 900.0}
    ),
}


@pytest.fixture(scope="module", params=RLOO_CASES)
def rloo(request: pytest.FixtureRequest, models: Models, rollout: Rollout, trl: TheirResult) -> tuple[Result, Result]:
    """Ours, and theirs by `RLOOTrainer`."""
    case = RLOO_CASES[request.param]
    return step(case, models, rollout), trl("rloo", models, off_policy=case.off_policy, **case.theirs)


class TestRLOOTrainer:
    def test_advantages_are_equal(self, rloo: tuple[Result, Result]) -> None:
        mine, theirs = (result.advantages for result in rloo)
        assert_equal_advantages(mine, theirs)

    def test_the_gradient_is_equal(self, rloo: tuple[Result, Result]) -> None:
        assert gradient_distance(*rloo) < TOLERANCE

    @pytest.mark.parametrize("rloo", ["a later update, with its ratio"], indirect=True)
    def test_the_loss_is_equal(self, rloo: tuple[Result, Result]) -> None:
        mine, theirs = rloo
        assert mine.loss == pytest.approx(theirs.loss, rel=TOLERANCE)


def assert_equal_advantages(mine: Tensor | None, theirs: Tensor | None) -> None:
    """Assert equality up to the rounding of float32 relative to the largest."""
    assert mine is not None
    assert theirs is not None
    assert (mine - theirs).abs().max() < TOLERANCE * mine.abs().max()
