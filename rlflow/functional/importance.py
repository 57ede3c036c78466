"""Correction for the gap between the policy that sampled and the policy that the trainer computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.functional.ratios import bounded, log_ratio
from rlflow.functional.shapes import token_mean, token_sum

ImportanceLevel = Literal["token", "sequence", "geometric"]
ImportanceMode = Literal["truncate", "mask"]


def importance_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    level: ImportanceLevel = "token",
    mode: ImportanceMode = "truncate",
    low: float = 0.5,
    high: float = 2.0,
) -> Tensor:
    """Weights that a loss on sampled tokens is multiplied by; with `d_t = log old_t - log rollout_t`:

        token        w_t = exp(d_t)
        sequence     w_t = exp(sum_s d_s)       its noise grows with the length; prefer one of the other two
        geometric    w_t = exp(mean_s d_s)

        truncate     min(w, high)               truncated importance sampling, arXiv 1802.01561
        mask         w where low <= w <= high, else 0    IcePop, arXiv 2510.18855

    `old` is the trainer's policy at the start of the step; the ratio of the policy in training to `old` stands in the
    loss, so do not use these weights where that ratio is taken to `rollout` directly (decoupled PPO, arXiv 2110.00641).
    A token that is masked still counts in the loss's denominator. Detached.

    Args:
        old_logprobs: `[B, T]`, the trainer's at the start of the step.
        rollout_logprobs: `[B, T]`, the engine's when it sampled.
        mask: `[B, T]`, nonzero on sampled tokens.
        level: Over what the ratio is taken.
        mode: What happens to large weights.
        low: The smallest weight that `mask` keeps; `truncate` has no lower end.
        high: The largest weight; `inf` leaves all as they are.

    Returns:
        `[B, T]` at every level, 0 where the mask is 0.

    Raises:
        UserError: The level or mode does not exist, or `low` exceeds `high`.
    """
    _check(level, mode, low, high)
    d = log_ratio(old_logprobs.detach(), rollout_logprobs)
    if level == "sequence":
        d = token_sum(d, mask).unsqueeze(1).expand_as(d)
    elif level == "geometric":
        d = token_mean(d, mask).unsqueeze(1).expand_as(d)
    weights = bounded(d).exp()
    if mode == "truncate":
        weights = weights.clamp(max=high)
    else:
        weights = torch.where((low <= weights) & (weights <= high), weights, 0.0)
    return weights.where(mask.bool(), 0.0)


def importance_dropped(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    level: ImportanceLevel = "token",
    mode: ImportanceMode = "truncate",
    low: float = 0.5,
    high: float = 2.0,
) -> Tensor:
    """1 at tokens whose weight `importance_weights` cut or set to 0, else 0; the mean is the dropped fraction.

    Noise alone grows with the length at the level `sequence`, so watch it there. Arguments as in `importance_weights`.

    Returns:
        `[B, T]` in the dtype of `old_logprobs`, 0 where the mask is 0.
    """
    every = importance_weights(old_logprobs, rollout_logprobs, mask, level, "truncate", low, torch.inf)
    outside = every > high if mode == "truncate" else (every < low) | (every > high)
    return (outside & mask.bool()).to(old_logprobs.dtype)


@dataclass(frozen=True)
class Importance:
    """How the gap between the policy that sampled and the one that the trainer computes is corrected.

    Attributes:
        level: Over what the ratio is taken: each `token`, the whole `sequence`, or its `geometric` mean.
        mode: `truncate` cuts weights at `high`; `mask` drops tokens whose weight is not between `low` and `high`.
        low: The smallest weight that `mask` keeps.
        high: The largest weight.
    """

    level: ImportanceLevel = "token"
    mode: ImportanceMode = "truncate"
    low: float = 0.5
    high: float = 2.0

    def __post_init__(self) -> None:
        _check(self.level, self.mode, self.low, self.high)

    def weights(self, old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
        """`importance_weights` with these settings, `[B, T]`."""
        return importance_weights(old_logprobs, rollout_logprobs, mask, self.level, self.mode, self.low, self.high)

    def dropped(self, old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
        """`importance_dropped` with these settings, `[B, T]`."""
        return importance_dropped(old_logprobs, rollout_logprobs, mask, self.level, self.mode, self.low, self.high)


def _check(level: str, mode: str, low: float, high: float) -> None:
    if level not in get_args(ImportanceLevel):
        raise UserError(
            f"importance level {level!r} does not exist; choose one of {', '.join(get_args(ImportanceLevel))}"
        )
    if mode not in get_args(ImportanceMode):
        raise UserError(f"importance mode {mode!r} does not exist; choose one of {', '.join(get_args(ImportanceMode))}")
    if not low >= 0:
        raise UserError(f"importance `low` is {low}, and weights are ratios of probabilities; give 0 or more")
    if low > high:
        raise UserError(f"importance weights between `low` {low} and `high` {high} do not exist; lower `low`")
