"""Log ratios of two policies on the same tokens, within bounds, so that no exponential of one overflows."""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0  # as in verl and OpenRLHF; exp(20) is 4.9e8


def log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """`log pi - log old` of each token, clamped to -20 and 20; `old_logprobs` is detached.

    Beyond them the gradient is 0. In float32 `exp` overflows at 89, and infinity times a gradient of 0 is NaN.

    Args:
        logprobs: `[B, T]` of the policy in training.
        old_logprobs: `[B, T]` of the other policy, for the same tokens.

    Returns:
        `[B, T]`.
    """
    return bounded(logprobs - old_logprobs.detach())


def bounded(log_ratios: Tensor) -> Tensor:
    """Log ratios of any shape, such as sums over a response, clamped to -20 and 20."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
