"""DPPO with the binary total variation: arXiv 2602.04879, from the paper's full text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.reference.papers.ragged import Ragged, token_mean


def masks(log_pi: Ragged, log_mu: Ragged, A: Sequence[float], delta: float) -> list[list[int]]:
    """M_t of eq. 12, section 4.3, with D = |mu(a_t) - pi(a_t)| of eq. 13, section 4.4.

    0 where (A > 0 and r > 1 and D > delta) or (A < 0 and r < 1 and D > delta), else 1. mu is the policy that sampled
    (section 5.2).
    """
    out = []
    for i in range(len(log_pi)):
        row = []
        for t in range(len(log_pi[i])):
            pi, mu = torch.exp(log_pi[i][t]).item(), torch.exp(log_mu[i][t]).item()
            away = (A[i] > 0 and pi / mu > 1) or (A[i] < 0 and pi / mu < 1)
            row.append(0 if away and abs(mu - pi) > delta else 1)
        out.append(row)
    return out


def loss(log_pi: Ragged, log_mu: Ragged, A: Sequence[float], delta: float) -> Tensor:
    """-E[sum_t M_t r_t A_t], eq. 12, r = pi / mu, not truncated (section 5.4).

    Eq. 12 sums a response's tokens; what the sum is divided by is not in it. The authors' code averages over tokens,
    and so does this.
    """
    M = masks(log_pi, log_mu, A, delta)
    return -token_mean(
        [
            [M[i][t] * torch.exp(log_pi[i][t] - log_mu[i][t]) * A[i] for t in range(len(log_pi[i]))]
            for i in range(len(log_pi))
        ]
    )
