"""GDPO: arXiv 2601.05242.

Source: TRL's paper index (equations), the authors' code NVlabs/GDPO (standard deviations).
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.reference.papers.ragged import mean, std


def advantages(
    rewards: Sequence[Sequence[Sequence[float]]],
    weights: Sequence[float] | None = None,
    ddof: int = 1,
    eps_group: float = 0.0,
    eps_batch: float = 0.0,
) -> list[list[float]]:
    """`rewards[n][i][j]`: part n, prompt i, response j. Eq. 4 to 6 of section 3.

    A_n = (r_n - mean of the group) / std of the group, for each part by itself; A = sum_n w_n A_n; then A is normalised
    over all responses of the batch. The paper does not say which std: the authors' code has ddof 1, and adds 1e-4. A
    part without spread in a group gives 0 there.
    """
    weights = [1.0] * len(rewards) if weights is None else weights
    A = [[0.0] * len(group) for group in rewards[0]]
    for part, w in zip(rewards, weights, strict=True):
        for i, group in enumerate(part):
            for j, r in enumerate(group):
                if max(group) > min(group):
                    A[i][j] += w * (r - mean(group)) / (std(group, ddof) + eps_group)
    flat = [a for group in A for a in group]
    if max(flat) == min(flat):
        return [[0.0] * len(group) for group in A]
    return [[(a - mean(flat)) / (std(flat, ddof) + eps_batch) for a in group] for group in A]
