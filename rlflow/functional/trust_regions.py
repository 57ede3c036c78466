"""What holds a policy near the one that sampled, in place of PPO's clip: a soft gate, and masks by divergence.

With `r = exp(log_ratio(logprobs, old_logprobs))`. Gradients flow through `logprobs` alone, and through no mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.functional.ratios import log_ratio
from rlflow.functional.shapes import beside_tokens, token_mean


def sapo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> Tensor:
    """`-sigmoid(tau (r - 1)) 4 / tau A`, with `tau_pos` where `A > 0` and `tau_neg` elsewhere.

    The gate weights the gradient of log pi by `4 p (1 - p) r`, `p = sigmoid(tau (r - 1))`: 1 at `r = 1`, less on both
    sides. SAPO, arXiv 2511.20347, equations 5 and 6.

    Args:
        logprobs: `[B, T]` of the policy in training.
        old_logprobs: `[B, T]` of the policy at the start of the step.
        advantages: `[B, T]`, or `[B, 1]` or `[B]` for one per sample.
        tau_pos: How sharply tokens with a positive advantage fade as their ratio leaves 1.
        tau_neg: The same for the others.

    Returns:
        `[B, T]`.
    """
    ratio = log_ratio(logprobs, old_logprobs).exp()
    advantages = beside_tokens(advantages.detach(), ratio)
    tau = torch.where(advantages > 0, torch.full_like(advantages, tau_pos), torch.full_like(advantages, tau_neg))
    return -(tau * (ratio - 1)).sigmoid() * 4 / tau * advantages


def dppo_tv_mask(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, delta: float) -> Tensor:
    """0 at tokens that moved by `|pi - old| > delta` and would move on, up where `A > 0` or down where `A < 0`; else 1.

    `|pi - old|` of the sampled token's probabilities is the total variation of the two policies, of the token against
    all others. DPPO, arXiv 2602.04879, equations 12 and 13; `old` there is the policy that sampled.

    Args:
        logprobs: `[B, T]` of the policy in training.
        old_logprobs: `[B, T]` of the policy that sampled.
        advantages: `[B, T]`, or `[B, 1]` or `[B]` for one per sample.
        delta: The total variation up to which every token counts.

    Returns:
        `[B, T]`, 0 or 1 in the dtype of `logprobs`, detached.
    """
    new, old = logprobs.detach(), old_logprobs.detach()
    advantages = beside_tokens(advantages.detach(), new)
    moves_on = ((advantages > 0) & (new > old)) | ((advantages < 0) & (new < old))
    far = (new.exp() - old.exp()).abs() > delta
    return (~(moves_on & far)).to(logprobs.dtype)


def off_policy_sequence_mask(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, delta: float
) -> Tensor:
    """0 where `A < 0` and the response's `mean_t (log old_t - log pi_t) > delta`, else 1.

    A bad response that the policy would hardly give any more teaches little and unsettles much. Off-policy sequence
    masking of DeepSeek-V3.2, arXiv 2512.02556, equation 9; `old` there is the policy that sampled.

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
    dropped = (beside_tokens(advantages.detach(), new) < 0) & (divergence > delta)[:, None]
    return (~dropped).to(logprobs.dtype).expand_as(logprobs)
