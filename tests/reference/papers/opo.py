"""OPO: arXiv 2505.23585."""

from __future__ import annotations

from collections.abc import Sequence


def advantages(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """R - b*, with b* = sum_i l_i R_i / sum_i l_i over the responses of a prompt; no division by a standard deviation.

    The optimal baseline is E[|grad log pi|^2 R] / E[|grad log pi|^2] and the squared norm is taken as proportional to
    the length.
    """
    baseline = sum(n * r for n, r in zip(lengths, rewards, strict=True)) / sum(lengths)
    return [r - baseline for r in rewards]
