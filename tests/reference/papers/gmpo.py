"""GMPO: arXiv 2507.20673, section 3."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

import torch
from torch import Tensor

from tests.reference.papers.ragged import Ragged, sum_of


def loss(log_pi: Ragged, log_old: Ragged, A: Sequence[float], epsilon_1: float = 0.4, epsilon_2: float = 0.4) -> Tensor:
    """-J_GMPO, eq. 4: the geometric mean over tokens of |min(rho A, clip(rho, e^-eps_1, e^eps_2) A)|, times sgn(A).

    The mean is over responses. The clip is for each token, and its bounds are powers of e.
    """
    terms = []
    for i in range(len(log_pi)):
        product = torch.ones((), dtype=torch.float64)
        for t in range(len(log_pi[i])):
            rho = torch.exp(log_pi[i][t] - log_old[i][t])
            clipped = torch.clamp(rho, exp(-epsilon_1), exp(epsilon_2))
            product = product * torch.abs(torch.min(rho * A[i], clipped * A[i]))
        sign = (A[i] > 0) - (A[i] < 0)
        terms.append(
            product ** (1 / len(log_pi[i])) * sign if sign else log_pi[i].sum() * 0
        )  # 0 ** (1 / n) has no gradient
    return -sum_of(terms) / len(log_pi)
