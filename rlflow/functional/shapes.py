"""Shapes that combine values of samples with values of tokens without a silent broadcast, and sums over tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def broadcast_to_tokens(x: Tensor, tokens: Tensor) -> Tensor:
    """`x` in a shape that broadcasts against `tokens` `[B, T]`: one number per sample `[B]` becomes `[B, 1]`.

    Without this, torch would broadcast `[B]` as one number per position if `B` happens to equal `T`.
    """
    return x.unsqueeze(1) if x.dim() == 1 and tokens.dim() == 2 else x


def token_sum(x: Tensor, mask: Tensor) -> Tensor:
    """The sum `[B]` of `x` `[B, T]` where `mask` is nonzero. Other entries, even NaN, are ignored."""
    return x.where(mask.bool(), 0.0).sum(dim=1)


def token_mean(x: Tensor, mask: Tensor) -> Tensor:
    """The mean `[B]` of `x` `[B, T]` where `mask` is nonzero; 0 in rows without a token."""
    return token_sum(x, mask) / mask.bool().sum(dim=1).clamp(min=1)


def float_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a result that follows from `x`: the dtype of `x` if it is floating, else the default dtype."""
    return x.dtype if x.is_floating_point() else torch.get_default_dtype()
