"""CPGD: arXiv 2505.12504, section 4.3."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import torch
from torch import Tensor

from tests.reference.papers.ragged import Ragged, mean, std, sum_of


def loss(
    log_pi: Sequence[Ragged],
    log_old: Sequence[Ragged],
    A: Sequence[Sequence[float]],
    epsilon: float,
    alpha: float,
    c: float,
) -> Tensor:
    """J_CPGD, eq. 2: prompt by prompt, 1 / sum_k |y^(k)| * sum_k sum_i (Phi_i - alpha E_i); then the mean over prompts,
    negated.

    Phi_i = min(ln(rho) A, clip(ln(rho), ln(1 - eps), ln(1 + eps)) A). E_i = min(sg(pi) / pi_old - 1, c) ln(pi), whose
    gradient is that of k3 of KL(pi_old || pi), clipped from above (eq. 4, 5). The paper gives no c; siiRL, of the same
    group, has 2.
    """
    prompts = []
    for x in range(len(log_pi)):
        terms = []
        for k in range(len(log_pi[x])):
            for i in range(len(log_pi[x][k])):
                log_rho = log_pi[x][k][i] - log_old[x][k][i]
                phi = torch.min(log_rho * A[x][k], torch.clamp(log_rho, log(1 - epsilon), log(1 + epsilon)) * A[x][k])
                drift = torch.clamp(torch.exp(log_rho.detach()) - 1, max=c) * log_pi[x][k][i]
                terms.append(phi - alpha * drift)
        prompts.append(sum_of(terms) / len(terms))
    return -sum_of(prompts) / len(prompts)


def advantages(groups: Sequence[Sequence[float]], weights: Sequence[float]) -> list[list[float]]:
    """A_omega = omega(x) (R - mean of the prompt's rewards), below eq. 2."""
    return [[w * (R - mean(group)) for R in group] for group, w in zip(groups, weights, strict=True)]


def std_weight(groups: Sequence[Sequence[float]], ddof: int) -> list[float]:
    """omega(x) = 1 / std, section 4.3 (III)(2), "the same as A_GRPO"; 0 for a group without spread, whose A is 0."""
    spreads = [std(group, ddof) for group in groups]
    return [1 / s if s > 0 else 0.0 for s in spreads]


def clip_filter_like_weight(groups: Sequence[Sequence[float]], c_omega: float) -> list[float]:
    """omega(x) = min(c_omega, |D| / number of prompts of D with std != 0), section 4.3 (III)(3).

    c_omega is 3 in the authors' code.
    """
    with_spread = sum(max(group) != min(group) for group in groups)
    return [min(c_omega, len(groups) / with_spread) if with_spread else 1.0] * len(groups)
