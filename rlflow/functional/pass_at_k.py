"""How often at least one of several responses is right."""

from __future__ import annotations

import torch
from torch import Tensor


def pass_at_k(correct: Tensor, n: int, k: int) -> Tensor:
    """The unbiased estimate of the chance that at least one of `k` responses to a prompt is right.

        pass@k = 1 - C(n - c, k) / C(n, k) = 1 - prod_{j < k} (n - c - j) / (n - j)

    arXiv 2107.03374, equation 1. The product stops at 0: among fewer than `k` wrong responses no `k` can be drawn.

    Args:
        correct: `[B]`, right responses `c` among the `n` of each prompt.
        n: Responses to each prompt.
        k: Responses drawn of them, from 1 to `n`.

    Returns:
        `[B]` float64.
    """
    if not 1 <= k <= n:
        raise ValueError(f"`k` is {k}; of {n} responses give 1 to {n}")
    drawn = torch.arange(k, device=correct.device, dtype=torch.float64)
    wrong_left = (n - correct.double()[:, None] - drawn).clamp(min=0.0)  # [B, k]
    estimate: Tensor = 1.0 - (wrong_left / (n - drawn)).prod(dim=1)
    return estimate
