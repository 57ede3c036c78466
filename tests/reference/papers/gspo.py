"""GSPO and GSPO-token: arXiv 2507.18071, section 4."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.reference.papers.ragged import Ragged, response_mean, sum_of


def sequence_ratio(log_pi: Tensor, log_old: Tensor) -> Tensor:
    """s_i = (pi(y_i) / pi_old(y_i))^(1 / |y_i|), eq. 7."""
    return torch.exp(sum_of(log_pi[t] - log_old[t] for t in range(len(log_pi))) / len(log_pi))


def loss(log_pi: Ragged, log_old: Ragged, A: Sequence[float], epsilon_low: float, epsilon_high: float) -> Tensor:
    """-J_GSPO, eq. 5: mean over responses of min(s_i A_i, clip(s_i, 1 - eps, 1 + eps) A_i)."""
    terms = []
    for i in range(len(log_pi)):
        s = sequence_ratio(log_pi[i], log_old[i])
        terms.append(torch.min(s * A[i], torch.clamp(s, 1 - epsilon_low, 1 + epsilon_high) * A[i]))
    return -sum_of(terms) / len(terms)


def token_loss(
    log_pi: Ragged, log_old: Ragged, A: Sequence[Sequence[float]], epsilon_low: float, epsilon_high: float
) -> Tensor:
    """-J_GSPO-token, eq. 13 with s_(i,t) = sg(s_i) pi_t / sg(pi_t) of eq. 14: mean over responses of their mean over
    tokens.
    """
    rows = []
    for i in range(len(log_pi)):
        s = sequence_ratio(log_pi[i], log_old[i]).detach()
        row = []
        for t in range(len(log_pi[i])):
            s_t = s * torch.exp(log_pi[i][t] - log_pi[i][t].detach())
            row.append(torch.min(s_t * A[i][t], torch.clamp(s_t, 1 - epsilon_low, 1 + epsilon_high) * A[i][t]))
        rows.append(row)
    return -response_mean(rows)
