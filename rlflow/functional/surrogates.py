"""Surrogate losses that replace PPO's clipped loss: per token `[B, T]`, or per sample `[B]`.

In all of them `r_t = exp(log_ratio(logprobs_t, old_logprobs_t))`. Gradients flow only through `logprobs`: old logprobs,
advantages and masks have none. Losses per token are not masked here, since `aggregate` ignores values on padding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlflow.functional.policy_gradient import log_ratio, ppo_clip_loss, ppo_is_clipped
from rlflow.functional.shapes import broadcast_to_tokens, token_mean


def cispo_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_high: float) -> Tensor:
    """`-sg(min(r, 1 + clip_high)) A log pi`: the clipped ratio weights the token, and no token loses its gradient.

    CISPO of MiniMax-M1, arXiv 2506.13585, equations 4 and 5. As in the paper there is no lower limit. The ratio is
    detached too.

    Args:
        logprobs: `[B, T]` of the policy in training.
        old_logprobs: `[B, T]` of the policy at the start of the step.
        advantages: `[B, T]`, or `[B, 1]` or `[B]` for one per sample.
        clip_high: Highest weight, less 1.

    Returns:
        `[B, T]`.
    """
    ratio = log_ratio(logprobs.detach(), old_logprobs).exp()
    return -ratio.clamp(max=1 + clip_high) * broadcast_to_tokens(advantages.detach(), ratio) * logprobs


def cpgd_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """`-min(A log pi, A clip(log pi, log old + ln(1 - clip_low), log old + ln(1 + clip_high)))`.

    PPO's clip without a ratio in the gradient. CPGD, arXiv 2505.12504. Its policy drift is a separate term,
    `cpgd_drift`.

    Args:
        logprobs: `[B, T]` of the policy in training.
        old_logprobs: `[B, T]` of the policy at the start of the step.
        advantages: `[B, T]`, or `[B, 1]` or `[B]` for one per sample.
        clip_low: Distance below 1 at which the ratio is clipped; less than 1.
        clip_high: Distance above 1 at which the ratio is clipped.

    Returns:
        `[B, T]`.
    """
    advantages = broadcast_to_tokens(advantages.detach(), logprobs)
    old = old_logprobs.detach()
    clipped = logprobs.clamp(old + math.log1p(-clip_low), old + math.log1p(clip_high))
    return -torch.minimum(advantages * logprobs, advantages * clipped)


def cpgd_drift(logprobs: Tensor, old_logprobs: Tensor, clip: float = 2.0) -> Tensor:
    """`min(sg(r) - 1, clip) log pi`: its gradient pulls the ratio back to 1 and is never larger than `clip`.

    The policy drift of CPGD, arXiv 2505.12504, equation 2. Without the clip its gradient is that of `r - 1 - log r`,
    which estimates `KL(old || pi)`. Its value is not a divergence, so log `kl_estimate(old, pi, "k3")` instead.

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
    """`-min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t)`; each token has the ratio of its sequence.

        s_t = sg(s) pi_t / sg(pi_t),    s = exp(mean_t log r_t),    sg: no gradient

    GSPO-token, arXiv 2507.18071, equations 13 and 14. If all tokens of a response have one advantage, the mean of this
    loss over its tokens has the value and the gradient of GSPO, equations 5 and 7. The paper's clips are 3e-4 and 4e-4.

    Args:
        logprobs: `[B, T]` of the policy in training.
        old_logprobs: `[B, T]` of the policy at the start of the step.
        advantages: `[B, T]`, or `[B, 1]` or `[B]` for one per sample.
        mask: `[B, T]`, nonzero on generated tokens.
        clip_low: Distance below 1 at which the ratio is clipped.
        clip_high: Distance above 1 at which the ratio is clipped.

    Returns:
        `[B, T]`; take the mean over each sample's tokens, then over samples.
    """
    of_sequence = token_mean(log_ratio(logprobs.detach(), old_logprobs), mask).unsqueeze(1)
    log_s = of_sequence + (logprobs - logprobs.detach())
    return ppo_clip_loss(log_s, torch.zeros_like(log_s), advantages, clip_low, clip_high)


def gspo_is_clipped(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """1 at tokens that have no gradient because of the clip of `gspo_loss`, else 0. The arguments are the same.

    Returns:
        `[B, T]`, detached, in the dtype of `logprobs`.
    """
    of_sequence = token_mean(log_ratio(logprobs.detach(), old_logprobs), mask).unsqueeze(1).expand_as(logprobs)
    return ppo_is_clipped(of_sequence, torch.zeros_like(of_sequence), advantages, clip_low, clip_high)


def gmpo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """`-A exp(mean_t c_t)` with `c = min(log r, clip_high)` where `A > 0`, and `c = max(log r, -clip_low)` elsewhere.

    It is the geometric mean over tokens of PPO's clipped `min`, with the range in log space: `r` is within
    `(exp(-clip_low), exp(clip_high))`. GMPO, arXiv 2507.20673, equation 4, with the range 0.4 both ways. Unlike the
    paper, each token may have an advantage: it decides the token's clip, and `A` is the mean over tokens.

    Args:
        logprobs: `[B, T]` of the policy in training.
        old_logprobs: `[B, T]` of the policy at the start of the step.
        advantages: `[B]`, `[B, 1]` or `[B, T]`.
        mask: `[B, T]`, nonzero on generated tokens.
        clip_low: Distance below 0 at which the log ratio is clipped.
        clip_high: Distance above 0 at which the log ratio is clipped.

    Returns:
        `[B]`.
    """
    log_r = log_ratio(logprobs, old_logprobs)
    advantages = broadcast_to_tokens(advantages.detach(), log_r).expand_as(log_r)
    clipped = torch.where(advantages > 0, log_r.clamp(max=clip_high), log_r.clamp(min=-clip_low))
    return -token_mean(advantages, mask) * token_mean(clipped, mask).exp()


def sapo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> Tensor:
    """`-sigmoid(tau (r - 1)) 4 / tau A`, with `tau_pos` where `A > 0` and `tau_neg` elsewhere.

    The weight of the gradient of log pi is `4 p (1 - p) r` with `p = sigmoid(tau (r - 1))`. The factor
    `4 p (1 - p)` is 1 at `r = 1`, and falls as `r` moves away from 1. SAPO, arXiv 2511.20347, equations 5 and 6.

    Args:
        logprobs: `[B, T]` of the policy in training.
        old_logprobs: `[B, T]` of the policy at the start of the step.
        advantages: `[B, T]`, or `[B, 1]` or `[B]` for one per sample.
        tau_pos: Temperature of tokens with a positive advantage: how sharply they fade as their ratio leaves 1.
        tau_neg: Temperature of all other tokens.

    Returns:
        `[B, T]`.
    """
    ratio = log_ratio(logprobs, old_logprobs).exp()
    advantages = broadcast_to_tokens(advantages.detach(), ratio)
    tau = torch.where(advantages > 0, torch.full_like(advantages, tau_pos), torch.full_like(advantages, tau_neg))
    return -(tau * (ratio - 1)).sigmoid() * 4 / tau * advantages


def dppo_tv_mask(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, delta: float) -> Tensor:
    """0 at tokens with `|pi - old| > delta` that the loss would move even farther from `old`, else 1.

    The loss moves a token's probability up where `A > 0`, and down where `A < 0`. `|pi - old|` of the sampled token's
    probabilities is the total variation of the two policies if all other tokens are one event. DPPO, arXiv 2602.04879,
    equations 12 and 13, where `old` is the policy that sampled.

    Args:
        logprobs: `[B, T]` of the policy in training.
        old_logprobs: `[B, T]` of the policy that sampled.
        advantages: `[B, T]`, or `[B, 1]` or `[B]` for one per sample.
        delta: The total variation up to which every token counts.

    Returns:
        `[B, T]`, 0 or 1 in the dtype of `logprobs`, detached.
    """
    new, old = logprobs.detach(), old_logprobs.detach()
    advantages = broadcast_to_tokens(advantages.detach(), new)
    moves_on = ((advantages > 0) & (new > old)) | ((advantages < 0) & (new < old))
    far = (new.exp() - old.exp()).abs() > delta
    return (~(moves_on & far)).to(logprobs.dtype)


def off_policy_sequence_mask(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, delta: float
) -> Tensor:
    """0 where `A < 0` and the response's `mean_t (log old_t - log pi_t) > delta`, else 1.

    A bad response that the policy would hardly sample any more teaches little and makes training unstable. Off-policy
    sequence masking of DeepSeek-V3.2, arXiv 2512.02556, equation 9, where `old` is the policy that sampled.

    Args:
        logprobs: `[B, T]` of the policy in training.
        old_logprobs: `[B, T]` of the policy that sampled.
        advantages: `[B, T]`, or `[B, 1]` or `[B]` for one per sample.
        mask: `[B, T]`, nonzero on generated tokens.
        delta: The mean log ratio up to which every response counts, in nats a token.

    Returns:
        `[B, T]`, 0 or 1 in the dtype of `logprobs`, detached.
    """
    new = logprobs.detach()
    divergence = token_mean(old_logprobs.detach() - new, mask)  # [B]
    dropped = (broadcast_to_tokens(advantages.detach(), new) < 0) & (divergence > delta)[:, None]
    return (~dropped).to(logprobs.dtype).expand_as(logprobs)
