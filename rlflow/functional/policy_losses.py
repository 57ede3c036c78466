"""Surrogate losses of policy gradients, per token `[B, T]` or, where the method is, per sample `[B]`.

With `r_t = exp(log_ratio(logprobs_t, old_logprobs_t))` everywhere. Gradients flow through `logprobs` alone: old
logprobs and advantages are detached. Losses per token are not masked here; what stands on padding has no part in
`aggregate`. With one update per step, `logprobs.detach()` serves as `old_logprobs`: the ratio is exactly 1 and the
gradient that of REINFORCE.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlflow.functional.ratios import log_ratio
from rlflow.functional.shapes import beside_tokens, token_mean


def ppo_clip_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """`-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`; with dual clip, where `A < 0`, at most `-dual_clip A`.

    PPO, arXiv 1707.06347, equation 7; a `clip_high` above `clip_low` is DAPO's clip-higher, arXiv 2503.14476; dual
    clip is arXiv 1912.09729.

    Args:
        logprobs: `[B, T]` of the policy in training.
        old_logprobs: `[B, T]` of the policy at the start of the step.
        advantages: `[B, T]`, or `[B, 1]` or `[B]` for one per sample.
        clip_low: How far below 1 the ratio still counts.
        clip_high: How far above 1 the ratio still counts.
        dual_clip: The ratio, above 1, from which a negative advantage no longer counts (3 in the paper); None is off.

    Returns:
        `[B, T]`.
    """
    ratio, advantages = _ratio_and_advantages(logprobs, old_logprobs, advantages)
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
    return -objective


def ppo_is_clipped(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """1 at tokens that the clips of `ppo_clip_loss` leave without a gradient, else 0; the mean is the clip fraction.

    Args:
        logprobs: `[B, T]` of the policy in training.
        old_logprobs: `[B, T]` of the policy at the start of the step.
        advantages: `[B, T]`, or `[B, 1]` or `[B]` for one per sample.
        clip_low: How far below 1 the ratio still counts.
        clip_high: How far above 1 the ratio still counts.
        dual_clip: The ratio from which a negative advantage no longer counts; None is off.

    Returns:
        `[B, T]`, detached, in the dtype of `logprobs`.
    """
    ratio, advantages = _ratio_and_advantages(logprobs.detach(), old_logprobs, advantages)
    above = (advantages > 0) & (ratio > 1 + clip_high)
    below = (advantages < 0) & (ratio < 1 - clip_low)
    clipped = above | below
    if dual_clip is not None:
        clipped = clipped | ((advantages < 0) & (ratio > dual_clip))
    return clipped.to(logprobs.dtype)


def cispo_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_high: float) -> Tensor:
    """`-sg(min(r, 1 + clip_high)) A log pi`: the clipped ratio weights the token and no token loses its gradient.

    CISPO of MiniMax-M1, arXiv 2506.13585, equations 4 and 5, without a lower end, as there. The ratio is detached too.

    Args:
        logprobs: `[B, T]` of the policy in training.
        old_logprobs: `[B, T]` of the policy at the start of the step.
        advantages: `[B, T]`, or `[B, 1]` or `[B]` for one per sample.
        clip_high: How far above 1 a weight may be.

    Returns:
        `[B, T]`.
    """
    ratio, advantages = _ratio_and_advantages(logprobs.detach(), old_logprobs, advantages)
    return -ratio.clamp(max=1 + clip_high) * advantages * logprobs


def cpgd_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """`-min(A log pi, A clip(log pi, log old + ln(1 - clip_low), log old + ln(1 + clip_high)))`.

    PPO's clip without a ratio in the gradient. CPGD, arXiv 2505.12504. Its policy drift is a term of its own,
    `cpgd_drift`.

    Args:
        logprobs: `[B, T]` of the policy in training.
        old_logprobs: `[B, T]` of the policy at the start of the step.
        advantages: `[B, T]`, or `[B, 1]` or `[B]` for one per sample.
        clip_low: How far below 1 the ratio still counts; less than 1.
        clip_high: How far above 1 the ratio still counts.

    Returns:
        `[B, T]`.
    """
    advantages = beside_tokens(advantages.detach(), logprobs)
    old = old_logprobs.detach()
    clipped = logprobs.clamp(old + math.log1p(-clip_low), old + math.log1p(clip_high))
    return -torch.minimum(advantages * logprobs, advantages * clipped)


def cpgd_drift(logprobs: Tensor, old_logprobs: Tensor, clip: float = 2.0) -> Tensor:
    """`min(sg(r) - 1, clip) log pi`: its gradient pulls the ratio back to 1 and is never larger than `clip`.

    The policy drift of CPGD, arXiv 2505.12504, equation 2: without the clip the gradient is that of `r - 1 - log r`,
    which estimates `KL(old || pi)`. The value is no divergence, so log `kl_estimate(old, pi, "k3")` instead.

    Args:
        logprobs: `[B, T]` of the policy in training.
        old_logprobs: `[B, T]` of the policy at the start of the step.
        clip: The largest gradient; 2 in the authors' code.

    Returns:
        `[B, T]`.
    """
    return log_ratio(logprobs.detach(), old_logprobs).expm1().clamp(max=clip) * logprobs


def gspo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """`-min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t)` with the ratio of the sequence on each of its tokens.

        s_t = sg(s) pi_t / sg(pi_t),    s = exp(mean_t log r_t),    sg: no gradient

    GSPO-token, arXiv 2507.18071, equations 13 and 14. Where a response has one advantage, the mean of this loss over
    its tokens has the value and the gradient of GSPO, equations 5 and 7. The clips there are 3e-4 and 4e-4.

    Args:
        logprobs: `[B, T]` of the policy in training.
        old_logprobs: `[B, T]` of the policy at the start of the step.
        advantages: `[B, T]`, or `[B, 1]` or `[B]` for one per sample.
        mask: `[B, T]`, nonzero on generated tokens.
        clip_low: How far below 1 the ratio still counts.
        clip_high: How far above 1 the ratio still counts.

    Returns:
        `[B, T]`; take the mean over each sample's tokens, then over samples.
    """
    of_sequence = token_mean(log_ratio(logprobs.detach(), old_logprobs), mask).unsqueeze(1)
    log_s = of_sequence + (logprobs - logprobs.detach())
    return ppo_clip_loss(log_s, torch.zeros_like(log_s), advantages, clip_low, clip_high)


def gspo_is_clipped(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """1 at tokens that the clip of `gspo_loss` leaves without a gradient, else 0; arguments as there.

    Returns:
        `[B, T]`, detached, in the dtype of `logprobs`.
    """
    of_sequence = token_mean(log_ratio(logprobs.detach(), old_logprobs), mask).unsqueeze(1).expand_as(logprobs)
    return ppo_is_clipped(of_sequence, torch.zeros_like(of_sequence), advantages, clip_low, clip_high)


def gmpo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """`-A exp(mean_t c_t)` with `c = min(log r, clip_high)` where `A > 0`, and `c = max(log r, -clip_low)` elsewhere.

    It is the geometric mean over tokens of PPO's clipped `min`, with the range in log space: `r` within
    `(exp(-clip_low), exp(clip_high))`. GMPO, arXiv 2507.20673, equation 4; the range there is 0.4 both ways. With an
    advantage for each token, which the paper has not, tokens are clipped by their own and `A` is the mean over them.

    Args:
        logprobs: `[B, T]` of the policy in training.
        old_logprobs: `[B, T]` of the policy at the start of the step.
        advantages: `[B]`, `[B, 1]` or `[B, T]`.
        mask: `[B, T]`, nonzero on generated tokens.
        clip_low: How far below 0 the log ratio still counts.
        clip_high: How far above 0 the log ratio still counts.

    Returns:
        `[B]`.
    """
    log_r = log_ratio(logprobs, old_logprobs)
    advantages = beside_tokens(advantages.detach(), log_r).expand_as(log_r)
    clipped = torch.where(advantages > 0, log_r.clamp(max=clip_high), log_r.clamp(min=-clip_low))
    return -token_mean(advantages, mask) * token_mean(clipped, mask).exp()


def _ratio_and_advantages(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    ratio = log_ratio(logprobs, old_logprobs).exp()
    return ratio, beside_tokens(advantages.detach(), ratio)
