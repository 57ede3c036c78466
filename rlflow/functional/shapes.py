"""How values of samples and values of tokens meet without a silent broadcast, and sums over a sequence's tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def beside_tokens(x: Tensor, tokens: Tensor) -> Tensor:
    """`x` so that it broadcasts against `tokens` `[B, T]`: one number per sample `[B]` becomes `[B, 1]`.

    Without this check, `[B]` together with `[B, T]` would be read as one number per position wherever `B` happens to
    equal `T`.
    """
    return x.unsqueeze(1) if x.dim() == 1 and tokens.dim() == 2 else x


def token_sum(x: Tensor, mask: Tensor) -> Tensor:
    """The sum `[B]` of `x` `[B, T]` where `mask` is nonzero; what stands elsewhere, NaN included, has no part in it."""
    return x.where(mask.bool(), 0.0).sum(dim=1)


def token_mean(x: Tensor, mask: Tensor) -> Tensor:
    """The mean `[B]` of `x` `[B, T]` where `mask` is nonzero; 0 in rows without a token."""
    return token_sum(x, mask) / mask.bool().sum(dim=1).clamp(min=1)


def float_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a result that follows `x`: its own if that is floating, else the default one."""
    return x.dtype if x.is_floating_point() else torch.get_default_dtype()
