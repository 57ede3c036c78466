"""The advantage of each response, or of each of its tokens: the baselines of the papers, over plain lists."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def grpo(rewards: Sequence[float], groups: Sequence[int], eps: float) -> list[float]:
    """`(r - mean) / (std + eps)` within the group, `std` with `n - 1`: GRPO, arXiv 2402.03300, section 4.1.2."""
    advantages = []
    for reward, group in zip(rewards, groups, strict=True):
        others = members(rewards, groups, group)
        advantages.append((reward - statistics.mean(others)) / (statistics.stdev(others) + eps))
    return advantages


def dr_grpo(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """`r - mean` within the group: Dr. GRPO, arXiv 2503.20783, section 3.1."""
    return [r - statistics.mean(members(rewards, groups, g)) for r, g in zip(rewards, groups, strict=True)]


def rloo(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """`r_i - mean of the r_j, j != i` of the group: RLOO, arXiv 2402.14740, equation 8."""
    advantages = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        others = [r for j, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and j != i]
        advantages.append(reward - statistics.mean(others))
    return advantages


def opo(rewards: Sequence[float], groups: Sequence[int], lengths: Sequence[int]) -> list[float]:
    """`r - sum_j l_j r_j / sum_j l_j` within the group: OPO, arXiv 2505.23585, equation 9."""
    advantages = []
    for reward, group in zip(rewards, groups, strict=True):
        mine = [(r, n) for r, g, n in zip(rewards, groups, lengths, strict=True) if g == group]
        advantages.append(reward - math.fsum(r * n for r, n in mine) / sum(n for _, n in mine))
    return advantages


def gpg(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """`alpha (r - mean)`, `alpha` all samples over those of groups with unequal rewards: GPG, arXiv 2504.02546, eq. 7.

    With `F_norm = 1`. Where no group has unequal rewards, every advantage is 0.
    """
    telling = [g for g in groups if len(set(members(rewards, groups, g))) > 1]
    return [a * len(groups) / max(len(telling), 1) for a in dr_grpo(rewards, groups)]


def cpgd_filtered(rewards: Sequence[float], groups: Sequence[int], cap: float) -> list[float]:
    """`min(cap, groups / groups with unequal rewards) (r - mean)`: CPGD, arXiv 2505.12504, section 4.3 (III)(3)."""
    telling = {g for g in groups if len(set(members(rewards, groups, g))) > 1}
    return [min(cap, len(set(groups)) / max(len(telling), 1)) * a for a in dr_grpo(rewards, groups)]


def rewards_to_go(rewards: Sequence[float], turn_rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """For each turn that any conversation has, of each: what it was given from this turn on, or from its last one.

    The part of a reward that is not of a turn is given at the end. Returns of turns: arXiv 2511.14846, undiscounted.
    """
    columns = []
    for k in range(max(len(each) for each in turn_rewards)):
        to_go = []
        for whole, each in zip(rewards, turn_rewards, strict=True):
            first = min(k, len(each) - 1)
            to_go.append(math.fsum(each[first:]) + whole - math.fsum(each))
        columns.append(to_go)
    return columns


def token_rewards(reward: float, penalties: Sequence[float]) -> list[float]:
    """`r_t = -penalty_t`, and the reward of the whole response on its last token: InstructGPT, arXiv 2203.02155."""
    rewards = [-penalty for penalty in penalties]
    rewards[-1] += reward
    return rewards


def discounted(rewards: Sequence[float], gamma: float) -> list[float]:
    """`G_t = sum_{s >= t} gamma^(s - t) r_s`: REINFORCE++, arXiv 2501.03262, with `gamma = 1` there."""
    steps = range(len(rewards))
    return [math.fsum(gamma ** (s - t) * rewards[s] for s in steps[t:]) for t in steps]


def gae(
    rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float, after: float = 0.0
) -> tuple[list[float], list[float]]:
    """`A_t = sum_l (gamma lam)^l delta_{t + l}` and `A_t + V_t`: arXiv 1506.02438, equation 16, the sum as it stands.

    Args:
        rewards: Rewards of each token.
        values: Values before each token.
        gamma: Discount.
        lam: Decay.
        after: The value after the last token.
    """
    following = [*values, after][1:]
    deltas = [r + gamma * n - v for r, v, n in zip(rewards, values, following, strict=True)]
    steps = range(len(deltas))
    advantages = [math.fsum((gamma * lam) ** (s - t) * deltas[s] for s in steps[t:]) for t in steps]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def whitened(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """`(x - mean) / std` over all entries of all rows, `std` with `n - 1`: REINFORCE++, arXiv 2501.03262."""
    entries = [x for row in rows for x in row]
    mean, std = statistics.fmean(entries), statistics.stdev(entries)
    return [[(x - mean) / std for x in row] for row in rows]


def overlong(length: int, longest: int, buffer: int) -> float:
    """The soft overlong punishment of DAPO, arXiv 2503.14476, equation 13."""
    if length <= longest - buffer:
        return 0.0
    if length <= longest:
        return (longest - buffer - length) / buffer
    return -1.0


def members(rewards: Sequence[float], groups: Sequence[int], group: int) -> list[float]:
    """The rewards of one group, in their order."""
    return [r for r, g in zip(rewards, groups, strict=True) if g == group]
