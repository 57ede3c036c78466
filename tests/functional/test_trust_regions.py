"""The soft gate and the masks equal the papers' equations, and numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from rlflow.functional import cispo_loss, dppo_tv_mask, off_policy_sequence_mask, sapo_loss
from tests.reference.papers import deepseek_v32, dppo, sapo
from tests.reference.papers.ragged import gradient, ragged

LENGTHS = (5, 2, 3, 4)
ADVANTAGES = (0.7, -1.3, 0.0, -0.4)
MASK = torch.arange(5) < torch.tensor(LENGTHS)[:, None]


def policies() -> tuple[Tensor, Tensor]:
    """Logprobs `[4, 5]` of two policies whose ratios lie between 0.4 and 2.5."""
    generator = torch.Generator().manual_seed(1)
    old = -torch.rand(4, 5, generator=generator, dtype=torch.float64) * 2 - 0.3
    return old + (torch.rand(4, 5, generator=generator, dtype=torch.float64) - 0.5) * 1.8, old


def rows(x: Tensor) -> list[Tensor]:
    return ragged([row[:length].tolist() for row, length in zip(x, LENGTHS, strict=True)])


def gradient_of(loss: Callable[[Tensor], Tensor]) -> list[list[float]]:
    """Gradient of the mean over responses of their mean over tokens, token by token."""
    new = policies()[0].requires_grad_()
    per_token = loss(new).where(MASK, 0.0)
    (per_token.sum(dim=1) / MASK.sum(dim=1)).mean().backward()
    assert new.grad is not None
    return [row[:length].tolist() for row, length in zip(new.grad, LENGTHS, strict=True)]


def test_sapo_has_the_gradient_of_the_paper() -> None:
    new, old = policies()
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)
    found = gradient_of(lambda logprobs: sapo_loss(logprobs, old, advantages, 2.0, 3.0))
    expected = gradient(lambda log_pi: sapo.loss(log_pi, rows(old), ADVANTAGES, 2.0, 3.0), rows(new))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-15)


def test_the_gate_of_sapo_is_widest_at_a_ratio_of_1() -> None:
    logprobs = torch.tensor([[0.0, 1.0]], dtype=torch.float64, requires_grad=True)
    loss = sapo_loss(logprobs, torch.zeros(1, 2).double(), torch.tensor([3.0]).double(), tau_pos=2.0)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    # of a ratio of 1 it is -A, as REINFORCE's; of e it is -A e 4 s (1 - s), s = sigmoid(2 (e - 1)) = 0.96883...
    s = 1 / (1 + math.exp(-2 * (math.e - 1)))
    assert_close(gradient, torch.tensor([[-3.0, -3.0 * math.e * 4 * s * (1 - s)]], dtype=torch.float64))


@pytest.mark.parametrize("delta", [0.02, 0.1])
def test_dppo_masks_the_tokens_of_the_paper(delta: float) -> None:
    new, old = policies()
    found = dppo_tv_mask(new, old, torch.tensor(ADVANTAGES), delta)
    expected = dppo.masks(rows(new), rows(old), ADVANTAGES, delta)
    assert [row[:length].tolist() for row, length in zip(found, LENGTHS, strict=True)] == expected
    assert 0 < sum(map(sum, expected)) < sum(LENGTHS)


def test_dppo_looks_at_probabilities_and_not_at_ratios() -> None:
    # A rare token, 0.001 to 0.01, has a ratio of 10 and moved by 0.009; a likely one, 0.5 to 0.9, one of 1.8 and 0.4.
    old, new = torch.tensor([[0.001, 0.5]]).log(), torch.tensor([[0.01, 0.9]]).log()
    assert dppo_tv_mask(new, old, torch.tensor([1.0]), delta=0.15).tolist() == [[1.0, 0.0]]
    assert dppo_tv_mask(new, old, torch.tensor([-1.0]), delta=0.15).tolist() == [[1.0, 1.0]]  # it moves back


@pytest.mark.parametrize("delta", [0.0, 0.1])
def test_sequence_masking_drops_the_responses_of_the_paper(delta: float) -> None:
    new, old = policies()
    old = old + 0.2  # so that some are above and some below
    found = off_policy_sequence_mask(new, old, torch.tensor(ADVANTAGES), MASK, delta)
    expected = deepseek_v32.sequence_masks(rows(new), rows(old), ADVANTAGES, delta)
    assert found.tolist() == [[float(counts)] * 5 for counts in expected]
    assert 0 in expected


def test_sequence_masking_keeps_good_responses_and_near_ones() -> None:
    old, new = torch.zeros(3, 2), torch.tensor([[-2.0, -1.0], [-2.0, -1.0], [-0.5, -0.5]])  # means 1.5, 1.5 and 0.5
    counts = off_policy_sequence_mask(new, old, torch.tensor([1.0, -1.0, -1.0]), torch.ones(3, 2), delta=0.5)
    assert counts[:, 0].tolist() == [1.0, 0.0, 1.0]


Mask = Callable[[Tensor, Tensor, Tensor], Tensor]
EACH: dict[str, Mask] = {
    "sapo": lambda new, old, A: sapo_loss(new, old, A),
    "dppo": lambda new, old, A: dppo_tv_mask(new, old, A, 0.1),
    "off-policy sequence": lambda new, old, A: off_policy_sequence_mask(new, old, A, torch.ones(4, 4), 0.0),
}


@pytest.mark.parametrize("each", EACH.values(), ids=EACH.keys())
def test_advantages_may_be_of_samples_or_of_tokens(each: Mask) -> None:
    new, old = (x[:, :4] for x in policies())  # square: B = T = 4
    advantages = torch.tensor([0.7, -1.3, 0.0, -0.4], dtype=torch.float64)
    expected = each(new, old, advantages)
    assert_close(each(new, old, advantages[:, None]), expected, rtol=0, atol=0)
    assert_close(each(new, old, advantages[:, None].expand(4, 4)), expected, rtol=0, atol=0)


@pytest.mark.parametrize("apart", [-89.5, 89.5])  # exp(89.5) is infinite in float32
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_policies_far_apart_leave_every_gradient_finite(apart: float, advantage: float) -> None:
    logprobs = torch.tensor([[apart, 0.0]], requires_grad=True)
    given = logprobs, torch.zeros(1, 2), torch.tensor([advantage])
    unclipped = dppo_tv_mask(*given, 0.1) * cispo_loss(*given, clip_high=math.inf)
    (sapo_loss(*given) + unclipped).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()
