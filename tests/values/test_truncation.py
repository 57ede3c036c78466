from __future__ import annotations

import math

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rlflow.errors import UserError
from rlflow.values.response_settings import SamplingSettings
from rlflow.values.truncation import Truncation, noted


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_p": 0.7}, [0, 1]),  # 0.5 is less than 0.7; 0.5 + 0.3 is not
        ({"top_p": 0.4}, [0]),
        ({"min_p": 0.25}, [0, 1, 2]),  # 0.25 * 0.5 is 0.125
        ({"min_p": 0.5, "top_p": 0.62}, [0]),  # of 0.5 and 0.3 the first has 0.625
        ({"top_k": 2, "top_p": 0.62}, [0]),
        ({"top_k": 9, "top_p": 0.96}, [0, 1, 2, 3]),
    ],
)
def test_top_k_top_p_and_min_p_keep_these_of_four_tokens(settings: dict[str, float], expected: list[int]) -> None:
    order = torch.tensor([2, 0, 3, 1])  # of the tokens 0 to 3 in the row
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    logits = torch.empty(1, 4, dtype=torch.float64)
    logits[0, order] = probs.log()
    kept = Truncation(**settings).kept(logits)[0]  # type: ignore[arg-type]
    assert kept[order].nonzero()[:, 0].tolist() == expected


@pytest.mark.parametrize(("top_p", "top_k", "min_p"), [(0.9, 50, 0.0), (0.5, 7, 0.02), (0.99, 300, 0.1), (1.0, 1, 0.0)])
def test_truncation_is_that_of_transformers_warpers_in_the_order_of_vllm(
    top_p: float, top_k: int, min_p: float
) -> None:
    logits = 3 * torch.randn(64, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = logits
    for warper in (MinPLogitsWarper(min_p), TopKLogitsWarper(top_k), TopPLogitsWarper(top_p)):
        expected = warper(torch.empty(64, 0), expected)  # type: ignore[arg-type]
    assert torch.equal(Truncation(top_p, top_k, min_p).kept(logits), expected.isfinite())


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e5, math.nan])
def test_a_temperature_at_which_logits_are_not_finite_is_refused(temperature: float) -> None:
    with pytest.raises(UserError, match=r"`temperature` is .*; it divides the logits"):
        SamplingSettings(temperature=temperature)


def test_as_many_tokens_as_top_k_stay_where_many_are_as_likely() -> None:
    assert Truncation(top_k=3).kept(torch.zeros(2, 8)).sum(1).tolist() == [3, 3]


def test_the_other_tokens_and_an_end_are_stored_with_their_logprobs() -> None:
    cut = -torch.inf
    logprobs = torch.tensor([[-0.5, cut, -2.0, -1.5], [cut, 0.0, cut, cut]])
    found = [(ids.tolist(), of_ids.tolist()) for ids, of_ids in noted(logprobs, torch.tensor([2, 1]))]
    assert found == [([0, 3, -1], [-0.5, -1.5, -2.0]), ([-1], [0.0])]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_p": 0.0}, "`top_p` is 0.0; give a probability above 0, at most 1"),
        ({"top_p": 1.1}, "`top_p` is 1.1"),
        ({"top_k": 0}, "`top_k` is 0; give a number of tokens, 1 or more, or null"),
        ({"min_p": 1.0}, "`min_p` is 1.0; give a share from 0 .* to below 1"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Truncation(**settings)  # type: ignore[arg-type]
