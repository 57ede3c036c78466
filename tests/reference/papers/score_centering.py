"""Score centering: arXiv 2609.20807, equations 3 and 7.

Source: the equations as rlflow's documentation has them; the paper's text was not at hand. The author of this file
had read rlflow's code; what does not come from there is the gradient, derived by hand instead of by autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from tests.reference.papers.ragged import mean


def advantages(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """A_i = r_i - mean(r)."""
    return [[r - mean(group) for r in group] for group in groups]


def weights(p: Sequence[float], q: Sequence[float], C: float | None) -> list[float]:
    """w(v) = min(p(v) / q(v), C), truncated importance sampling; 1 without it."""
    return [1.0 if C is None else min(p[v] / q[v], C) for v in range(len(p))]


def loss(p: Sequence[float], q: Sequence[float], y: int, A: float, C: float | None) -> float:
    """-A (w(y) log p(y) - sum_v q(v) w(v) log p(v)) at one place, where q sampled y.

    v goes over the tokens that q could sample; p and q are probabilities over these.
    """
    w = weights(p, q, C)
    expected = 0.0
    for v in range(len(p)):
        expected += q[v] * w[v] * log(p[v])
    return -A * (w[y] * log(p[y]) - expected)


def gradient(p: Sequence[float], q: Sequence[float], y: int, A: float, C: float | None) -> list[float]:
    """d loss / d z with p = softmax(z), w fixed, by hand: the score d log p(v) / d z_k is [k = v] - p(k).

    The score of y, weighted, less the expectation of weighted scores under q.
    """
    w = weights(p, q, C)
    out = []
    for k in range(len(p)):
        expected = 0.0
        for v in range(len(p)):
            expected += q[v] * w[v] * ((k == v) - p[k])
        out.append(-A * (w[y] * ((k == y) - p[k]) - expected))
    return out
