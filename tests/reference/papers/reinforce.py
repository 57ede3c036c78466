"""REINFORCE on samples of another policy: Williams 1992; Precup, Sutton and Singh 2000; RLOO's baseline, arXiv
2402.14740.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.reference.papers.ragged import Ragged, token_mean


def rloo_advantages(R: Sequence[float]) -> list[float]:
    """R(y_i, x) - 1 / (k - 1) sum_(j != i) R(y_j, x), arXiv 2402.14740, eq. 7 in section 3.2."""
    k = len(R)
    return [R[i] - sum(R[j] for j in range(k) if j != i) / (k - 1) for i in range(k)]


def loss(log_pi: Ragged, log_mu: Ragged, A: Sequence[float]) -> Tensor:
    """-E_mu[(pi / mu) A], whose gradient is -E_mu[(pi / mu) A grad log pi]; one ratio for each token."""
    return -token_mean(
        [[torch.exp(log_pi[i][t] - log_mu[i][t]) * A[i] for t in range(len(log_pi[i]))] for i in range(len(log_pi))]
    )
