"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float | None = None) -> Tensor:
    """`max((V - R)^2, (clip(V, V_old - clip_range, V_old + clip_range) - R)^2) / 2`; without a range `(V - R)^2 / 2`.

    The clip keeps the critic near its values at the start of the step; it comes from PPO's first implementation and is
    described in arXiv 2005.12729. `old_values` and `returns` are detached.

    Args:
        values: `[B, T]` of the critic in training.
        old_values: `[B, T]` of the critic at the start of the step.
        returns: `[B, T]`, the targets.
        clip_range: How far a value may move from its old one and still count; None is off.

    Returns:
        `[B, T]`.
    """
    targets = returns.detach()
    squares = (values - targets).square()
    if clip_range is not None:
        old = old_values.detach()
        clipped = values.clamp(old - clip_range, old + clip_range)
        squares = torch.maximum(squares, (clipped - targets).square())
    return squares / 2
