"""REINFORCE++ and its variant with a baseline: arXiv 2501.03262, section 3, with the equations of later versions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tests.reference.papers.ragged import Ragged, mean, std, token_mean


def advantages(
    r: Sequence[float],
    log_old: Sequence[Sequence[float]],
    log_ref: Sequence[Sequence[float]],
    beta: float,
    ddof: int = 0,
) -> list[list[float]]:
    """A_t = r(x, y) - beta sum_(i >= t) KL(i), KL(i) = log(pi_old / pi_ref), eq. 4; eq. 5: over the batch's tokens.

    The paper does not say which std. The authors' code (OpenRLHF) divides by the number of tokens: ddof 0.
    """
    A = []
    for i in range(len(r)):
        kl = [log_old[i][t] - log_ref[i][t] for t in range(len(log_old[i]))]
        A.append([r[i] - beta * sum(kl[t:]) for t in range(len(kl))])
    return normalised(A, ddof)


def advantages_with_baseline(
    groups: Sequence[Sequence[float]], lengths: Sequence[Sequence[int]], ddof: int = 0
) -> list[list[float]]:
    """A' = R - mean of the group, eq. 6; eq. 7 is over the batch's tokens, each with its response's A'."""
    A = []
    for group, group_lengths in zip(groups, lengths, strict=True):
        for R, length in zip(group, group_lengths, strict=True):
            A.append([R - mean(group)] * length)
    return normalised(A, ddof)


def normalised(A: Sequence[Sequence[float]], ddof: int) -> list[list[float]]:
    tokens = [a for row in A for a in row]
    center, scale = mean(tokens), std(tokens, ddof)
    return [[(a - center) / scale for a in row] for row in A]


def k2_loss(log_pi: Ragged, log_ref: Ragged) -> Tensor:
    """1/2 (log pi / pi_ref)^2, eq. 8: the KL of the variant with a baseline is a term of the loss, by k2."""
    return token_mean(
        [[(log_pi[i][t] - log_ref[i][t]) ** 2 / 2 for t in range(len(log_pi[i]))] for i in range(len(log_pi))]
    )
