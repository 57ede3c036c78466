from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from rlflow.functional import (
    cispo_loss,
    cpgd_drift,
    cpgd_loss,
    gmpo_loss,
    gspo_is_clipped,
    gspo_loss,
    ppo_clip_loss,
    ppo_is_clipped,
)

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of logprobs, old logprobs, advantages [B], mask

LOSSES: dict[str, Loss] = {
    "ppo": lambda new, old, A, mask: ppo_clip_loss(new, old, A, 0.2, 0.28),
    "ppo-dual-clip": lambda new, old, A, mask: ppo_clip_loss(new, old, A, 0.2, 0.28, dual_clip=3.0),
    "cispo": lambda new, old, A, mask: cispo_loss(new, old, A, 0.28),
    "cpgd": lambda new, old, A, mask: cpgd_loss(new, old, A, 0.2, 0.28),
    "gspo": lambda new, old, A, mask: gspo_loss(new, old, A, mask, 0.2, 0.28),
    "gmpo": lambda new, old, A, mask: gmpo_loss(new, old, A, mask, 0.4, 0.4),
}
EVERY_LOSS = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())


def loss_and_gradient(
    loss: Callable[..., Tensor], ratio: float, advantage: float, **settings: Any
) -> tuple[float, float]:
    """Loss and gradient of one token with this ratio, sampled at a logprob of -1; the gradient is to the logprob."""
    old = torch.tensor([[-1.0]], dtype=torch.float64)
    new = (old + math.log(ratio)).requires_grad_()
    value = loss(new, old, torch.tensor([advantage], dtype=torch.float64), **settings)
    value.sum().backward()
    assert new.grad is not None
    return value.item(), new.grad.item()


def samples() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four responses of at most five tokens, with ratios from 0.4 to 2.5; the last has no token."""
    generator = torch.Generator().manual_seed(1)
    old = -torch.rand(4, 5, generator=generator, dtype=torch.float64) * 3 - 1
    new = old + (torch.rand(4, 5, generator=generator, dtype=torch.float64) - 0.5) * 1.8
    mask = torch.arange(5) < torch.tensor([5, 2, 3, 0])[:, None]
    return new, old, torch.tensor([0.7, -1.3, 0.4, 1.0], dtype=torch.float64), mask


@EVERY_LOSS
def test_gradients_agree_with_finite_differences(loss: Loss) -> None:
    new, old, advantages, mask = samples()
    if loss is LOSSES["gspo"]:  # its ratio is a constant but for each token's own: compared with sequences below
        return
    if loss is LOSSES["cispo"]:  # its weight is a constant to the gradient: hold it fixed for the differences
        weight = (new - old).exp().clamp(max=1.28) * advantages[:, None]
        logprobs = new.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(logprobs, old, advantages, mask).sum(), logprobs)
        assert_close(gradient, -weight)
        return
    assert torch.autograd.gradcheck(lambda x: loss(x, old, advantages, mask), new.requires_grad_())


@EVERY_LOSS
def test_on_policy_the_gradient_is_that_of_reinforce(loss: Loss) -> None:
    _, old, advantages, mask = samples()
    new = old.clone().requires_grad_()
    per_token = loss(new, new.detach(), advantages, mask)
    reinforce = -advantages[:, None].expand_as(old) * mask
    if per_token.dim() == 2:
        (per_token * mask).sum().backward()
    else:  # losses per sample take the mean over tokens
        per_token.sum().backward()
        reinforce = reinforce / mask.sum(dim=1, keepdim=True).clamp(min=1)
    assert new.grad is not None
    assert_close(new.grad, reinforce, rtol=1e-12, atol=1e-12)


@EVERY_LOSS
def test_without_advantage_the_gradient_is_exactly_zero(loss: Loss) -> None:
    new, old, advantages, mask = samples()
    new.requires_grad_()
    loss(new, old, torch.zeros_like(advantages), mask).sum().backward()
    assert new.grad is not None
    assert (new.grad == 0.0).all()


@EVERY_LOSS
def test_old_logprobs_and_advantages_are_detached(loss: Loss) -> None:
    new, old, advantages, mask = samples()
    assert not loss(new, old.requires_grad_(), advantages.requires_grad_(), mask).requires_grad


@EVERY_LOSS
@pytest.mark.parametrize("apart", [-89.5, 89.5])  # exp(89.5) is infinite in float32
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_policies_far_apart_leave_loss_and_gradient_finite(loss: Loss, apart: float, advantage: float) -> None:
    logprobs = torch.tensor([[apart, 0.0]], requires_grad=True)
    value = loss(logprobs, torch.zeros(1, 2), torch.tensor([advantage]), torch.ones(1, 2))
    value.sum().backward()
    assert logprobs.grad is not None
    assert value.isfinite().all()
    assert logprobs.grad.isfinite().all()


@EVERY_LOSS
def test_one_advantage_per_sample_may_be_a_column_or_not(loss: Loss) -> None:
    new, old, advantages, mask = (x[:, :4] if x.dim() == 2 else x for x in samples())  # square: B = T = 4
    assert_close(loss(new, old, advantages, mask), loss(new, old, advantages[:, None], mask))


@EVERY_LOSS
def test_one_advantage_may_stand_on_every_token(loss: Loss) -> None:
    new, old, advantages, mask = samples()
    assert_close(loss(new, old, advantages, mask), loss(new, old, advantages[:, None].expand(4, 5), mask))


def test_gspo_of_tokens_has_the_loss_and_the_gradient_of_sequences() -> None:
    new, old, advantages, mask = samples()
    per_token, per_sequence = new.clone().requires_grad_(), new.clone().requires_grad_()
    lengths = mask.sum(dim=1).clamp(min=1)
    of_tokens = (gspo_loss(per_token, old, advantages, mask, 0.1, 0.1) * mask).sum(dim=1) / lengths
    ratio = (((per_sequence - old) * mask).sum(dim=1) / lengths).exp()  # equations 5 and 7
    of_sequences = -torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages)
    assert_close(of_tokens * (mask.sum(dim=1) > 0), of_sequences * (mask.sum(dim=1) > 0))
    of_tokens.sum().backward()
    of_sequences.sum().backward()
    assert per_token.grad is not None
    assert per_sequence.grad is not None
    assert_close(per_token.grad, per_sequence.grad)
    assert (per_token.grad[mask] != 0).any()


def test_gspo_weighs_each_token_by_its_own_advantage() -> None:
    # ratios 2 and 2: the gradient of a token is -s A_t = -2 A_t where its own clip leaves it
    new = torch.tensor([[math.log(2.0)] * 3], requires_grad=True)
    advantages = torch.tensor([[1.0, -3.0, 0.5]])
    gspo_loss(new, torch.zeros(1, 3), advantages, torch.ones(1, 3), 0.2, 0.28).sum().backward()
    assert new.grad is not None
    assert_close(new.grad, torch.tensor([[0.0, 6.0, 0.0]]))


def test_gmpo_clips_by_token_advantages_and_weighs_by_their_mean() -> None:
    log_ratios, advantages = torch.tensor([[0.8, -0.9, 0.1, 7.0]]), torch.tensor([[2.0, -1.0, 0.5, 9.0]])
    loss = gmpo_loss(log_ratios, torch.zeros(1, 4), advantages, torch.tensor([[1, 1, 1, 0]]), 0.3, 0.4)
    assert_close(loss, torch.tensor([-0.5 * math.exp((0.4 - 0.3 + 0.1) / 3)]))


def test_gmpo_ignores_what_stands_on_padding() -> None:
    loss = LOSSES["gmpo"]
    new, old, advantages, mask = samples()
    rubbish = new.where(mask, torch.nan).requires_grad_()
    value = loss(rubbish, old, advantages, mask)
    value.sum().backward()
    assert_close(value, loss(new, old, advantages, mask))
    assert rubbish.grad is not None
    assert rubbish.grad.isfinite().all()


def test_clip_higher_lets_a_likelier_token_learn(known: dict[str, Any]) -> None:
    answer = known["clip_higher"]
    wide = loss_and_gradient(ppo_clip_loss, answer["ratio"], answer["advantage"], clip_low=0.2, clip_high=0.28)
    narrow = loss_and_gradient(ppo_clip_loss, answer["ratio"], answer["advantage"], clip_low=0.2, clip_high=0.2)
    assert_close(wide, (-answer["clip_high_0.28"]["objective"], -1.25))  # d(rA)/dlogp = r A
    assert_close(narrow, (-answer["clip_high_0.2"]["objective"], 0.0))


def test_the_clip_is_one_sided() -> None:
    # a good token that became less likely, and a bad one that became likelier, still learn
    assert_close(loss_and_gradient(ppo_clip_loss, 0.5, 1.0, clip_low=0.2, clip_high=0.2), (-0.5, -0.5))
    assert_close(loss_and_gradient(ppo_clip_loss, 2.0, -1.0, clip_low=0.2, clip_high=0.2), (2.0, 2.0))
    assert_close(loss_and_gradient(ppo_clip_loss, 0.5, -1.0, clip_low=0.2, clip_high=0.2), (0.8, 0.0))


def test_dual_clip_bounds_the_loss_of_a_bad_token(known: dict[str, Any]) -> None:
    answer = known["dual_clip"]
    clips = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": answer["dual_clip"]}
    value, gradient = loss_and_gradient(ppo_clip_loss, answer["ratio"], answer["advantage"], **clips)
    assert_close((value, gradient), (-answer["objective"], answer["gradient"]))


def test_dual_clip_leaves_good_tokens_alone() -> None:
    clips = {"clip_low": 0.2, "clip_high": 9.0}
    plain = loss_and_gradient(ppo_clip_loss, 5.0, 1.0, **clips)
    assert loss_and_gradient(ppo_clip_loss, 5.0, 1.0, **clips, dual_clip=3.0) == plain


@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_is_clipped_marks_the_tokens_without_a_gradient(dual_clip: float | None) -> None:
    new, old, advantages, _ = samples()
    new.requires_grad_()
    ppo_clip_loss(new, old, advantages, 0.2, 0.28, dual_clip).sum().backward()
    marks = ppo_is_clipped(new, old, advantages, 0.2, 0.28, dual_clip)
    assert (marks.sum() > ppo_is_clipped(new, old, advantages, 0.2, 0.28).sum()) == (dual_clip is not None)
    assert new.grad is not None
    assert marks.tolist() == (new.grad == 0.0).double().tolist()
    assert 0 < marks.mean() < 1


def test_cispo_weighs_the_logprob_by_the_clipped_ratio() -> None:
    # the token's logprob is -1 + ln r; its weight is min(r, 1 + 0.28)
    assert_close(loss_and_gradient(cispo_loss, 2.0, 1.0, clip_high=0.28), (-1.28 * (-1 + math.log(2)), -1.28))
    assert_close(loss_and_gradient(cispo_loss, 0.1, 1.0, clip_high=0.28), (-0.1 * (-1 + math.log(0.1)), -0.1))


def test_cpgd_clips_the_logprob_itself() -> None:
    clips = {"clip_low": 0.2, "clip_high": 0.28}
    assert_close(loss_and_gradient(cpgd_loss, 1.1, 2.0, **clips), (-2 * (-1 + math.log(1.1)), -2.0))
    assert_close(loss_and_gradient(cpgd_loss, 1.5, 2.0, **clips), (-2 * (-1 + math.log(1.28)), 0.0))
    assert_close(loss_and_gradient(cpgd_loss, 0.5, -2.0, **clips), (2 * (-1 + math.log(0.8)), 0.0))
    assert_close(loss_and_gradient(cpgd_loss, 1.5, -2.0, **clips), (2 * (-1 + math.log(1.5)), 2.0))


def test_gspo_takes_the_ratio_of_the_sequence(known: dict[str, Any]) -> None:
    log_ratios = torch.tensor([known["gspo_ratio"]["log_ratios"]])
    loss = gspo_loss(log_ratios, torch.zeros(1, 3), torch.ones(1), torch.ones(1, 3), 0.2, 0.28)
    assert_close(-loss, torch.full((1, 3), known["gspo_ratio"]["ratio"]), rtol=0, atol=1e-6)


def test_gspo_clips_the_ratio_of_the_sequence() -> None:
    # ratios 4 and 1: the geometric mean, 2, is clipped, so neither token has a gradient
    new = torch.tensor([[math.log(4.0), 0.0]], requires_grad=True)
    loss = gspo_loss(new, torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2), 0.2, 0.28)
    loss.sum().backward()
    assert_close(loss, torch.tensor([[-1.28, -1.28]]))
    assert new.grad is not None
    assert new.grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("advantage", "clipped"),
    [(2.0, [0.4, -0.9, 0.1]), (-2.0, [0.8, -0.3, 0.1])],  # above at 0.4 if good, below at -0.3 if bad
)
def test_gmpo_clips_each_token_before_the_mean(advantage: float, clipped: list[float]) -> None:
    log_ratios = torch.tensor([[0.8, -0.9, 0.1]])
    loss = gmpo_loss(log_ratios, torch.zeros(1, 3), torch.tensor([advantage]), torch.ones(1, 3), 0.3, 0.4)
    assert_close(loss, torch.tensor([-advantage * math.exp(sum(clipped) / 3)]))


def test_gmpo_is_the_geometric_mean_of_ppo() -> None:
    new, old, advantages, _ = (x[:2] for x in samples())
    per_token = -ppo_clip_loss(new, old, advantages, 1 - math.exp(-0.4), math.exp(0.4) - 1)
    mean = per_token.abs().log().mean(dim=1).exp() * advantages.sign()
    assert_close(gmpo_loss(new, old, advantages, torch.ones(2, 5), 0.4, 0.4), -mean)


def test_the_drift_of_cpgd_pulls_the_ratio_back_to_one() -> None:
    # r - 1 of ratios 2, 1 and 1/4; and at most 2, of ratios 3.5 and e^3
    logprobs = torch.tensor([[2.0, 1.0, 0.25, 3.5, math.exp(3)]], dtype=torch.float64).log().requires_grad_()
    cpgd_drift(logprobs, torch.zeros(1, 5, dtype=torch.float64)).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist()[0] == pytest.approx([1.0, 0.0, -0.75, 2.0, 2.0])


def test_the_gradient_of_the_drift_is_that_of_its_divergence_below_the_clip() -> None:
    new, old, _, _ = samples()  # ratios of at most 2.5
    drift, divergence = new.clone().requires_grad_(), new.clone().requires_grad_()
    cpgd_drift(drift, old).sum().backward()
    ((divergence - old).exp() - 1 - (divergence - old)).sum().backward()
    assert drift.grad is not None
    assert divergence.grad is not None
    assert_close(drift.grad, divergence.grad)


def test_sequences_without_a_gradient_are_those_that_gspo_is_said_to_clip() -> None:
    logprobs = torch.tensor([[0.1, 0.3], [0.1, -0.1], [-0.4, -0.2], [-0.4, -0.2]], requires_grad=True)
    old, mask, advantages = torch.zeros(4, 2), torch.ones(4, 2), torch.tensor([1.0, 1.0, -1.0, 1.0])
    gspo_loss(logprobs, old, advantages, mask, 0.1, 0.1).sum().backward()
    assert logprobs.grad is not None
    clipped = gspo_is_clipped(logprobs, old, advantages, mask, 0.1, 0.1)
    assert clipped.tolist() == (logprobs.grad == 0).float().tolist()
    assert clipped[:, 0].tolist() == [1, 0, 1, 0]
