"""ReMax: arXiv 2310.10505, section 4 and Algorithm 1."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tests.reference.papers.ragged import Ragged, sum_of


def loss(log_pi: Ragged, r: Sequence[float], r_greedy: Sequence[float]) -> Tensor:
    """Its gradient is -1/N sum_i sum_t s(x_i, a_(1:t)) (r(x_i, a_(1:T)) - b(x_i)), s = grad log pi, b the greedy
    response's reward.

    A response's tokens are added up, not averaged; responses are averaged. The authors' code divides by the number of
    tokens of the batch instead of N, which is the same direction.
    """
    N = len(log_pi)
    return -sum_of(sum_of(log_pi[i]) * (r[i] - r_greedy[i]) for i in range(N)) / N


def advantages_with_kl(
    r: Sequence[float],
    r_greedy: Sequence[float],
    log_pi: Sequence[Sequence[float]],
    log_ref: Sequence[Sequence[float]],
    beta: float,
) -> list[list[float]]:
    """r - b - beta sum_(t' >= t) log(pi / pi_ref): the full-step KL of appendix B; one-step has its own term.

    Source: `compute_returns` of the authors' code (liziniu/ReMax), which has both.
    """
    gaps = [[p - q for p, q in zip(log_pi[i], log_ref[i], strict=True)] for i in range(len(r))]
    return [[r[i] - r_greedy[i] - beta * sum(gap[t:]) for t in range(len(gap))] for i, gap in enumerate(gaps)]
