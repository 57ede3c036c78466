"""DeepSeek-V3.2: arXiv 2512.02556, section 3.1.

Source: quotations of eq. 7 to 9 in TRL's paper index and in a blog's copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.reference.papers.ragged import Ragged, response_mean


def unbiased_kl(log_pi: Tensor, log_old: Tensor, log_ref: Tensor) -> Tensor:
    """(pi / pi_old) (pi_ref / pi - log(pi_ref / pi) - 1), eq. 7, one token.

    The gradient goes through both factors.
    """
    u = torch.exp(log_ref - log_pi)
    return torch.exp(log_pi - log_old) * (u - torch.log(u) - 1)


def sequence_masks(log_pi: Ragged, log_mu: Ragged, A: Sequence[float], delta: float) -> list[int]:
    """M_i of eq. 9: 0 where A_i < 0 and 1 / |o_i| sum_t log(pi_old / pi) > delta, else 1.

    pi_old there is what the sampling engine returned, so that both staleness and the engine's gap count.
    """
    out = []
    for i in range(len(log_pi)):
        T = len(log_pi[i])
        divergence = sum((log_mu[i][t] - log_pi[i][t]).item() for t in range(T)) / T
        out.append(0 if A[i] < 0 and divergence > delta else 1)
    return out


def loss(
    log_pi: Ragged,
    log_old: Ragged,
    log_mu: Ragged,
    log_ref: Ragged,
    A: Sequence[float],
    epsilon: float,
    beta: float,
    delta: float,
) -> Tensor:
    """-J_GRPO of eq. 8: min(r A, clip(r) A) M_i - beta KL, mean over tokens, then over responses.

    M does not multiply the KL.
    """
    M = sequence_masks(log_pi, log_mu, A, delta)
    rows = []
    for i in range(len(log_pi)):
        row = []
        for t in range(len(log_pi[i])):
            r = torch.exp(log_pi[i][t] - log_old[i][t])
            clipped = torch.min(r * A[i], torch.clamp(r, 1 - epsilon, 1 + epsilon) * A[i])
            row.append(clipped * M[i] - beta * unbiased_kl(log_pi[i][t], log_old[i][t], log_ref[i][t]))
        rows.append(row)
    return -response_mean(rows)
