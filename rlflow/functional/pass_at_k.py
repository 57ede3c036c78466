"""Probability that at least one of several responses is right, and the confidence interval of a mean over prompts."""

from __future__ import annotations

import torch
from torch import Tensor

DRAWN = 2**22  # numbers that are drawn together


def pass_at_k(correct: Tensor, n: int, k: int) -> Tensor:
    """The unbiased estimate of the chance that at least one of `k` responses to a prompt is right.

        pass@k = 1 - C(n - c, k) / C(n, k) = 1 - prod_{j < k} (n - c - j) / (n - j)

    arXiv 2107.03374, equation 1. If fewer than `k` responses are wrong, a factor of the product is 0, and pass@k is 1.

    Args:
        correct: `[B]`, number of right responses `c` among the `n` of each prompt.
        n: Number of responses to each prompt.
        k: Number of responses that are drawn from them, from 1 to `n`.

    Returns:
        `[B]` float64.
    """
    if not 1 <= k <= n:
        raise ValueError(f"`k` is {k}; of {n} responses give 1 to {n}")
    drawn = torch.arange(k, device=correct.device, dtype=torch.float64)
    wrong_left = (n - correct.double()[:, None] - drawn).clamp(min=0.0)  # [B, k]
    estimate: Tensor = 1.0 - (wrong_left / (n - drawn)).prod(dim=1)
    return estimate


def bootstrap_interval(
    values: Tensor, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """The percentile bootstrap interval of a mean over prompts: Efron and Tibshirani 1993, chapter 13.

    Prompts are drawn with replacement, each with all of its responses, since responses to one prompt are correlated.

    Args:
        values: `[B]`, one number for each prompt, such as its share of right responses.
        level: Confidence level: how often such an interval contains the true mean.
        resamples: Number of times that the prompts are drawn.
        seed: Seed of the draws.

    Returns:
        The lower and the upper end of the interval.
    """
    generator = torch.Generator().manual_seed(seed)
    values = values.double().cpu()
    prompts, means = len(values), list[Tensor]()
    for start in range(0, resamples, some := max(1, DRAWN // prompts)):
        drawn = torch.randint(prompts, (min(some, resamples - start), prompts), generator=generator)
        means.append(values[drawn].mean(dim=1))
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.cat(means).quantile(ends).tolist()
    return low, high
