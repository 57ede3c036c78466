"""GPG: arXiv 2504.02546, section 2."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tests.reference.papers.ragged import Ragged, mean, token_mean


def advantages(groups: Sequence[Sequence[float]], F_norm: float = 1.0) -> list[list[float]]:
    """A = alpha (r_i - mean(r)) / F_norm, eq. 6 and 7, with alpha = B / (B - M) ("accurate gradient estimation").

    B groups are in the step, M of them have no gradient, as all their rewards are equal. F_norm is 1 by default.
    """
    B = len(groups)
    M = sum(max(group) == min(group) for group in groups)
    alpha = B / (B - M) if M < B else 1.0
    return [[alpha * (r - mean(group)) / F_norm for r in group] for group in groups]


def loss(log_pi: Ragged, A: Sequence[float]) -> Tensor:
    """-log pi A over all tokens of the step, eq. 5: no ratio, no clip, no KL."""
    return token_mean([[-token * A[i] for token in log_pi[i]] for i in range(len(log_pi))])
