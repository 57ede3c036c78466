"""On-policy distillation: GKD, arXiv 2306.13649, and MiniLLM, arXiv 2306.08543.

q is the student here, p the teacher.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.reference.papers.ragged import Ragged, response_mean, sum_of


def gkd_loss(q_logits: Sequence[Tensor], p_logits: Sequence[Tensor]) -> Tensor:
    """L_GKD with lambda = 1 and beta = 1, arXiv 2306.13649 section 3: reverse KL(q || p) at the prefixes that the
    student visited.

    `q_logits[i]` is [|y_i|, V]. D(p || q)(y | x) = 1 / L_y sum_n D(p(. | y_<n, x) || q(. | y_<n, x)); the gradient does
    not go through the sampling of y. The sum over the vocabulary is exact.
    """
    rows = []
    for q_row, p_row in zip(q_logits, p_logits, strict=True):
        row = []
        for n in range(len(q_row)):
            log_q, log_p = torch.log_softmax(q_row[n], -1), torch.log_softmax(p_row[n], -1)
            row.append(sum_of(torch.exp(log_q[v]) * (log_q[v] - log_p[v]) for v in range(len(log_q))))
        rows.append(row)
    return response_mean(rows)


def minillm_loss(log_q: Ragged, log_p: Ragged) -> Tensor:
    """Its gradient is eq. 2 of arXiv 2306.08543, section 2.2: -sum_t (R_t - 1) grad log q(y_t), R_t = sum_(t' >= t)
    log(p / q).

    The -1 has the expectation 0, as sum_t E[grad log q] = 0. Summed over tokens, averaged over responses.
    """
    terms = []
    for i in range(len(log_q)):
        gap = [(log_p[i][t] - log_q[i][t]).item() for t in range(len(log_q[i]))]
        for t in range(len(gap)):
            terms.append(-(sum(gap[t:]) - 1) * log_q[i][t])
    return sum_of(terms) / len(log_q)


def per_token_reverse_kl_advantages(log_q: Ragged, log_p: Ragged) -> list[list[float]]:
    """A_t = log p - log q of the sampled token: MiniLLM's R_t cut after its first term, and GKD's gradient by one
    sample.

    With q fixed, E_q[(log p - log q) grad log q] = -grad KL(q || p), exactly and prefix by prefix.
    """
    return [[(log_p[i][t] - log_q[i][t]).item() for t in range(len(log_q[i]))] for i in range(len(log_q))]
