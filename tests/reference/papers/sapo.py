"""SAPO: arXiv 2511.20347.

Source: summaries of the paper, TRL's paper index, verl, AReaL and Trinity-RFT, which agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.reference.papers.ragged import Ragged, response_mean


def loss(log_pi: Ragged, log_old: Ragged, A: Sequence[float], tau_pos: float = 1.0, tau_neg: float = 1.05) -> Tensor:
    """-J_SAPO, eq. 5, with f(x) = sigmoid(tau (x - 1)) 4 / tau of eq. 6, tau = tau_pos where A > 0, else tau_neg.

    The mean is over responses, of their mean over tokens. d f / d log pi = 4 p (1 - p) r with p = sigmoid(tau (r - 1)).
    """
    rows = []
    for i in range(len(log_pi)):
        tau = tau_pos if A[i] > 0 else tau_neg
        row = []
        for t in range(len(log_pi[i])):
            r = torch.exp(log_pi[i][t] - log_old[i][t])
            row.append(torch.sigmoid(tau * (r - 1)) * 4 / tau * A[i])
        rows.append(row)
    return -response_mean(rows)
