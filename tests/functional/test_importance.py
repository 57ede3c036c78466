from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from rlflow.errors import UserError
from rlflow.functional import Importance, expected_logprobs, importance_dropped, importance_weights

# Log ratios of one response of three tokens, and of one of a single token with rubbish on its padding.
OLD = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, 80.0, torch.nan]])
ROLLOUT = torch.tensor([[-1.2, -0.9, -1.5], [-2.0, -90.0, 0.0]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])


@pytest.mark.parametrize(
    ("answer", "arguments"),
    [
        ("plain", {"high": math.inf}),
        ("truncated_at_2", {"mode": "truncate", "high": 2.0}),
        ("masked_outside_0.5_2", {"mode": "mask", "low": 0.5, "high": 2.0}),
    ],
)
def test_importance_weights_are_the_known_ones(known: dict[str, Any], answer: str, arguments: dict[str, Any]) -> None:
    old = torch.tensor([[known["importance_weights"]["old_logprob"]]])
    rollout = torch.tensor([[known["importance_weights"]["rollout_logprob"]]])
    weights = importance_weights(old, rollout, torch.ones(1, 1), Importance(**arguments))
    assert_close(weights.item(), known["importance_weights"][answer], rtol=0, atol=1e-6)


def test_weights_of_tokens_take_the_log_ratio_of_each_token() -> None:
    expected = torch.tensor([[math.exp(0.2), math.exp(-0.1), math.exp(0.5)], [math.e, 0.0, 0.0]])
    assert_close(importance_weights(OLD, ROLLOUT, MASK, Importance("token", high=9.0)), expected)


def test_weights_of_sequences_take_the_sum_of_log_ratios() -> None:
    expected = torch.tensor([[math.exp(0.6)] * 3, [math.e, 0.0, 0.0]])
    assert_close(importance_weights(OLD, ROLLOUT, MASK, Importance("sequence", high=9.0)), expected)


def test_geometric_weights_take_the_mean_of_log_ratios() -> None:
    expected = torch.tensor([[math.exp(0.2)] * 3, [math.e, 0.0, 0.0]])
    assert_close(importance_weights(OLD, ROLLOUT, MASK, Importance("geometric", high=9.0)), expected)


def test_truncation_has_no_lower_end() -> None:
    weights = importance_weights(torch.tensor([[-3.0]]), torch.tensor([[-1.0]]), torch.ones(1, 1), Importance(low=0.5))
    assert_close(weights.item(), math.exp(-2.0))


def test_masking_drops_small_weights_too_and_keeps_its_ends() -> None:
    log_ratios = torch.tensor([[2.0, 0.5, 0.4, 2.1, 1.0]], dtype=torch.float64).log()
    weights = importance_weights(log_ratios, torch.zeros(1, 5), torch.ones(1, 5), Importance(mode="mask"))
    assert_close(weights, torch.tensor([[2.0, 0.5, 0.0, 0.0, 1.0]], dtype=torch.float64))


def test_a_sequence_whose_ratio_overflows_is_truncated_or_dropped() -> None:
    old, rollout, mask = torch.full((1, 4), -1.0), torch.full((1, 4), -30.0), torch.ones(1, 4)
    assert importance_weights(old, rollout, mask, Importance("sequence")).tolist() == [[2.0] * 4]
    assert importance_weights(old, rollout, mask, Importance("sequence", "mask")).tolist() == [[0.0] * 4]


def test_weights_are_detached() -> None:
    old = torch.zeros(1, 2, requires_grad=True)
    assert not importance_weights(old, torch.zeros(1, 2), torch.ones(1, 2), Importance("geometric")).requires_grad


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"level": "batch"}, r"level 'batch' does not exist; choose one of token, sequence, geometric"),
        ({"mode": "clip"}, r"mode 'clip' does not exist; choose one of truncate, mask"),
        ({"low": 3.0}, r"`low` 3.0 and `high` 2.0"),
    ],
)
def test_settings_that_cannot_work_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Importance(**arguments)


def test_the_dropped_are_those_that_weights_cut() -> None:
    # Ratios e, 1, 1/e and, on padding, e^2; between 0.5 and 2 is one of them.
    old, rollout = torch.tensor([[0.0, 0.0, -1.0, 2.0]]), torch.tensor([[-1.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, True, False]])
    assert importance_dropped(old, rollout, mask).tolist() == [[1, 0, 0, 0]]
    assert importance_dropped(old, rollout, mask, Importance(mode="mask")).tolist() == [[1, 0, 1, 0]]


def test_the_dropped_fraction_of_noise_grows_with_the_length_of_sequences() -> None:
    # P(|N(0, sigma^2 T)| > ln 2) at sigma 0.02 and T = 1024: sigma sqrt(T) = 0.64, so P(|N| > 1.083) = 0.279
    d = torch.randn(4000, 1024, generator=torch.Generator().manual_seed(0)) * 0.02
    dropped = importance_dropped(d, torch.zeros_like(d), torch.ones_like(d), Importance("sequence", "mask"))
    assert dropped[:, 0].mean().item() == pytest.approx(0.279, abs=0.02)
    for settings in (Importance("token", "mask"), Importance("geometric", "mask")):
        assert importance_dropped(d, torch.zeros_like(d), torch.ones_like(d), settings).sum() == 0


@pytest.mark.parametrize("importance", [None, Importance(), Importance(mode="mask"), Importance(high=math.inf)])
def test_the_expected_score_of_what_a_sampler_draws_is_0_once_it_is_centered(importance: Importance | None) -> None:
    """Four tokens, the last of them cut off; each is sampled once, and counts as often as it is drawn."""
    logits = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    sampler = torch.tensor([0.6, 0.05, 0.35], dtype=torch.float64).log()
    logprobs = logits.log_softmax(0)
    weights = torch.ones(3) if importance is None else importance_weights(logprobs, sampler, torch.ones(3), importance)
    padded = torch.cat([logprobs, torch.zeros(1, dtype=torch.float64)])[None, None]
    of_engine = torch.cat([sampler, torch.tensor([-torch.inf], dtype=torch.float64)])[None, None]
    expected = expected_logprobs(padded, of_engine, importance)
    drawn = (sampler.exp() * weights * logprobs).sum()
    (drift,) = torch.autograd.grad(drawn, logits, retain_graph=True)
    (left,) = torch.autograd.grad(drawn - expected.squeeze(), logits)
    assert_close(left, torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-15)
    unbiased = importance is not None and importance.high == math.inf
    assert (float(drift.norm()) < 1e-15) == unbiased
