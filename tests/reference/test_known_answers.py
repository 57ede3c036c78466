"""The references against numbers that were worked out by hand or stand in the papers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from tests.reference import advantages_float64 as worth
from tests.reference import surrogates_float64 as surrogates
from tests.reference.pairs_float64 import Pair, dpo_update, reward_model_update
from tests.reference.policy_float64 import Folders, Objective, Sample, critic_update, policy_update
from tests.reference.test_references import VOCABULARY, write_model
from tests.reference.update import (
    load_classifier_float64,
    load_float64,
    response_score,
    response_scores,
    response_values,
)

CLOSE = 1e-6  # the known answers have seven digits


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("policy"), seed=0)


@pytest.fixture(scope="module")
def critic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classifier(tmp_path_factory.mktemp("critic"), seed=2)


def write_classifier(folder: Path, seed: int) -> Path:
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        num_labels=1,
    )
    torch.manual_seed(seed)
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    return folder


def token(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64, requires_grad=True)


def slope(loss: Tensor, at: Tensor) -> float:
    return torch.autograd.grad(loss, at)[0].item() if loss.requires_grad else 0.0


def test_group_advantages_are_the_known_ones(known: dict[str, Any]) -> None:
    rewards, groups = known["group_normalized"]["rewards"], [7] * 4
    assert worth.grpo(rewards, groups, 1e-6) == pytest.approx(known["group_normalized"]["advantages"], abs=CLOSE)
    assert worth.dr_grpo(rewards, groups) == pytest.approx(known["group_normalized"]["dr_grpo"], abs=CLOSE)
    assert worth.rloo(rewards, groups) == pytest.approx(known["rloo"]["advantages"], abs=CLOSE)
    constant = known["zero_variance_group"]
    assert worth.grpo(constant["rewards"], [0] * 12, 1e-6) == constant["advantages"]


def test_opo_weighs_by_length() -> None:
    # b = (1 * 3 + 0 * 1) / 4 = 0.75; the other group's is 2
    assert worth.opo([1, 0, 2], [0, 0, 1], [3, 1, 5]) == [0.25, -0.75, 0.0]


def test_gpg_makes_up_for_the_groups_without_signal() -> None:
    # Of 4 samples 2 are in a group with signal: alpha = 2, of 0.5 and -0.5.
    assert worth.gpg([1, 0, 1, 1], [0, 0, 1, 1]) == [1.0, -1.0, 0.0, 0.0]
    assert worth.gpg([1, 1], [0, 0]) == [0.0, 0.0]


def test_gae_gives_the_known_advantages_and_returns(known: dict[str, Any]) -> None:
    given = known["gae"]
    arguments = given["rewards"], given["values"], given["gamma"], given["lam"]
    advantages, returns = worth.gae(*arguments)
    assert advantages == pytest.approx(given["advantages"], abs=CLOSE)
    assert returns == pytest.approx(given["returns"], abs=CLOSE)
    assert worth.gae(*arguments, after=0.8)[0] == pytest.approx(given["advantages_with_bootstrap_0.8"], abs=CLOSE)


def test_returns_of_penalised_tokens_are_those_by_hand() -> None:
    rewards = worth.token_rewards(1.0, [0.1, 0.2, 0.4])
    assert rewards == pytest.approx([-0.1, -0.2, 0.6])
    assert worth.discounted(rewards, 0.5) == pytest.approx([-0.1 - 0.1 + 0.15, -0.2 + 0.3, 0.6])


def test_whitening_is_unbiased(known: dict[str, Any]) -> None:
    ((*first,), (*second,)) = worth.whitened([[1, 1], [-1, -3]])
    assert first + second == pytest.approx(known["global_whiten"]["unbiased_std"], abs=CLOSE)


def test_overlong_penalties_are_the_known_ones(known: dict[str, Any]) -> None:
    given = known["overlong_penalty"]
    for length, penalty in given["cases"].items():
        assert worth.overlong(int(length), given["max_length"], given["buffer"]) == penalty


@pytest.mark.parametrize(("high", "objective", "moves"), [(0.28, 1.25, True), (0.2, 1.2, False)])
def test_clip_higher_lets_a_likelier_token_learn(high: float, objective: float, moves: bool) -> None:
    new = token(math.log(1.25))
    (loss,) = surrogates.ppo([new], [0.0], [1.0], 0.2, high)
    assert loss.item() == pytest.approx(-objective)
    assert (slope(loss, new) != 0) == moves


def test_dual_clip_gives_the_known_objective_and_gradient(known: dict[str, Any]) -> None:
    given, new = known["dual_clip"], token(math.log(5.0))
    (loss,) = surrogates.ppo([new], [0.0], [given["advantage"]], 0.2, 0.2, given["dual_clip"])
    assert (-loss.item(), slope(loss, new)) == (given["objective"], given["gradient"])


def test_gspo_has_one_ratio_for_the_response(known: dict[str, Any]) -> None:
    given = known["gspo_ratio"]
    losses = surrogates.gspo([token(x) for x in given["log_ratios"]], [0.0] * 3, 1.0, 0.2, 0.28)
    assert [-loss.item() for loss in losses] == pytest.approx([given["ratio"]] * 3, abs=CLOSE)


@pytest.mark.parametrize(
    ("advantage", "mean"),  # of log ratios 0.6, -0.9, 0.1 within -0.3 and 0.4, on the side where PPO clips
    [(2.0, (0.4 - 0.9 + 0.1) / 3), (-2.0, (0.6 - 0.3 + 0.1) / 3)],
)
def test_gmpo_is_the_geometric_mean_of_clipped_ratios(advantage: float, mean: float) -> None:
    losses = surrogates.gmpo([token(x) for x in (0.6, -0.9, 0.1)], [0.0] * 3, advantage, 0.3, 0.4)
    # prod |min(r A, clip(r) A)| ^ 1/T is |A| times the geometric mean of the clipped ratios
    assert [loss.item() for loss in losses] == pytest.approx([-advantage * math.exp(mean)] * 3)


def test_cispo_and_policy_gradient_keep_every_gradient() -> None:
    new = token(math.log(3.0))
    (loss,) = surrogates.cispo([new], [0.0], [-2.0], 0.28)
    assert slope(loss, new) == pytest.approx(1.28 * 2.0)
    (loss,) = surrogates.policy_gradient([new], [-2.0])
    assert slope(loss, new) == 2.0


def test_cpgd_stops_outside_its_range_and_its_drift_pulls_back() -> None:
    new = token(math.log(1.5))
    (loss,) = surrogates.cpgd([new], [0.0], [1.0], 0.2, 0.28, drift=0.0, c=2.0)
    assert (loss.item(), slope(loss, new)) == (pytest.approx(-math.log(1.28)), 0.0)
    (loss,) = surrogates.cpgd([new], [0.0], [1.0], 0.2, 0.28, drift=0.1, c=2.0)
    assert slope(loss, new) == pytest.approx(0.1 * (1.5 - 1))
    (loss,) = surrogates.cpgd([new], [0.0], [1.0], 0.2, 0.28, drift=0.1, c=0.3)
    assert slope(loss, new) == pytest.approx(0.1 * 0.3)


def test_importance_weights_are_the_known_ones(known: dict[str, Any]) -> None:
    given = known["importance_weights"]
    old, rollout = [given["old_logprob"]], [given["rollout_logprob"]]
    cut = surrogates.importance(old, rollout, "token", "truncate", 0.5, 2.0)
    assert cut == pytest.approx([given["truncated_at_2"]], abs=CLOSE)
    assert surrogates.importance(old, rollout, "token", "mask", 0.5, 2.0) == [given["masked_outside_0.5_2"]]
    free = surrogates.importance(old, rollout, "token", "mask", 0.5, 3.0)
    assert free == pytest.approx([given["plain"]], abs=CLOSE)


def test_importance_weights_of_responses_take_the_sum_or_mean_of_log_ratios() -> None:
    old, rollout = [0.3, -0.1], [0.0, 0.0]
    assert surrogates.importance(old, rollout, "sequence", "truncate", 0.5, 2.0) == pytest.approx([math.exp(0.2)] * 2)
    assert surrogates.importance(old, rollout, "geometric", "truncate", 0.5, 2.0) == pytest.approx([math.exp(0.1)] * 2)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_divergences_are_the_known_ones(known: dict[str, Any], kind: str) -> None:
    given = known["kl"]
    found = surrogates.divergence(token(given["logprob"]), given["ref_logprob"], kind)
    assert found.item() == pytest.approx(given[kind], abs=CLOSE)


@pytest.mark.parametrize(
    ("kind", "answer"), [("k1", "k1_loss"), ("k2", "k2_loss"), ("k3", "k3_loss"), ("k3+", "k2_loss")]
)
def test_divergences_have_the_known_expected_gradients(known: dict[str, Any], kind: str, answer: str) -> None:
    logit = token(1.0)
    logprobs = torch.log_softmax(torch.stack([logit, torch.zeros_like(logit)]), dim=0)
    ref = torch.log_softmax(torch.tensor([-0.5, 0.0], dtype=torch.float64), dim=0).tolist()
    terms = [surrogates.divergence(new, r, kind) for new, r in zip(logprobs, ref, strict=True)]
    expected = sum(p * term for p, term in zip(logprobs.exp().tolist(), terms, strict=True))
    assert isinstance(expected, Tensor)
    assert slope(expected, logit) == pytest.approx(known["kl_gradient"][answer], abs=CLOSE)


def test_the_clipped_value_loss_is_the_known_one(known: dict[str, Any]) -> None:
    given, new = known["value_clip"], token(known["value_clip"]["value"])
    (loss,) = surrogates.value([new], [given["old_value"]], [given["return"]], given["clip_range"])
    assert loss.item() == pytest.approx(given["loss"])


def test_temperature_divides_the_logits_and_entropy_is_of_that_distribution(policy: Path) -> None:
    model = load_float64(policy)
    logits = model(input_ids=torch.tensor([[1, 2]])).logits[0, -1]
    (logprob,), (entropy,) = response_scores(model, [1, 2], [5], temperature=0.5)
    p = (logits / 0.5).softmax(dim=0)
    assert (logprob.item(), entropy.item()) == (
        pytest.approx(p[5].log().item()),
        pytest.approx(-(p * p.log()).sum().item()),
    )


def test_the_value_before_a_token_is_the_score_of_what_stands_before_it(critic: Path) -> None:
    model = load_classifier_float64(critic)
    prompt, response = [3, 1], [4, 1, 5]
    values, after = response_values(model, prompt, response)
    scores = [response_score(model, prompt, response[:t]).item() for t in range(4)]
    assert [*values.tolist(), after.item()] == pytest.approx(scores, abs=1e-6)  # its norms and angles are float32


def test_dpo_of_a_policy_that_equals_its_reference_is_log_2(policy: Path) -> None:
    pairs = [Pair([1, 2], [3, 4], [5]), Pair([2], [6], [7, 8])]
    update = dpo_update(policy, policy, pairs, beta=0.3)
    assert update.loss == pytest.approx(math.log(2))
    # The gradient there is half beta times that of the logprobs of the rejected less the chosen: GPG's loss.
    advantages = [0.15 / 2, -0.15 / 2]  # the mean of two pairs
    samples = [
        Sample(p.prompt_ids, ids, advantage, group=0, greedy_reward=0.0)
        for p in pairs
        for ids, advantage in zip((p.chosen_ids, p.rejected_ids), advantages, strict=True)
    ]
    objective = Objective("remax", "policy gradient", loss_aggregation="sequence-mean-token-sum")
    other = policy_update(policy, samples, objective)
    for name, gradient in update.gradient.items():
        assert gradient.flatten().tolist() == pytest.approx((4 * other.gradient[name]).flatten().tolist(), abs=1e-12)


def test_a_reward_model_without_preference_loses_log_2(critic: Path) -> None:
    model = load_classifier_float64(critic)
    pair = Pair([1, 2], [3], [4, 5])
    margin = response_score(model, [1, 2], [3]) - response_score(model, [1, 2], [4, 5])
    assert reward_model_update(critic, [pair]).loss == pytest.approx(math.log1p(math.exp(-margin.item())))
    assert reward_model_update(critic, [Pair([1, 2], [3], [3])]).loss == pytest.approx(math.log(2))


def test_a_critic_that_is_right_has_no_loss(policy: Path, critic: Path) -> None:
    model = load_classifier_float64(critic)
    values, _ = response_values(model, [1, 2], [3])
    sample = Sample([1, 2], [3], reward=values.item(), group=0)
    assert critic_update(policy, [sample], Objective("gae"), folders=Folders(critic=critic)).loss == 0.0


def test_the_critic_moves_to_the_returns_with_its_clip(policy: Path, critic: Path) -> None:
    # One token, so its return is the reward; the value moved 0.5 up from its old one, of which 0.2 count.
    (value,), _ = response_values(load_classifier_float64(critic), [1, 2], [3])
    sample = Sample([1, 2], [3], reward=2.0 + value.item(), group=0, old_values=[value.item() - 0.5])
    update = critic_update(policy, [sample], Objective("gae"), folders=Folders(critic=critic))
    assert update.loss == pytest.approx(2.3**2 / 2)  # the larger error, of value - 0.5 + 0.2, which has no gradient
    assert update.gradient_norm == 0.0
