"""ReMax: arXiv 2310.10505, section 4 and Algorithm 1."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tests.reference.papers.ragged import Ragged, sum_of


def loss(log_pi: Ragged, r: Sequence[float], r_greedy: Sequence[float]) -> Tensor:
    """Its gradient is -1/N sum_i sum_t s(x_i, a_(1:t)) (r(x_i, a_(1:T)) - b(x_i)), s = grad log pi, b the greedy
    response's reward.

    A response's tokens are added up, not averaged; responses are averaged.
    """
    N = len(log_pi)
    return -sum_of(sum_of(log_pi[i]) * (r[i] - r_greedy[i]) for i in range(N)) / N
