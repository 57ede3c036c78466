"""MaxRL: arXiv 2602.02710.

Source: the authors' page and code (tajwarfahim/maxrl), two reproductions that quote eq. 9 and 10.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tests.reference.papers.ragged import Ragged, sum_of


def weights(r: Sequence[float]) -> list[float]:
    """Factors on S_i = grad log pi(y_i) in eq. 10: r_i / K - 1 / N of N responses with K right; all 0 if K is 0
    (section 4.3).

    N times that is (r_i - mean) / mean, the advantage of the authors' code.
    """
    N, K = len(r), sum(r)
    return [r_i / K - 1 / N if K else 0.0 for r_i in r]


def advantages(r: Sequence[float]) -> list[float]:
    return [len(r) * w for w in weights(r)]


def loss(log_pi: Ragged, groups: Sequence[Sequence[float]]) -> Tensor:
    """Loss; its gradient is minus the mean over prompts of eq. 10's estimator, with log pi(y) the sum over a response's
    tokens.
    """
    total, i = [], 0
    for r in groups:
        for w in weights(r):
            total.append(w * sum_of(log_pi[i]))
            i += 1
    return -sum_of(total) / len(groups)
