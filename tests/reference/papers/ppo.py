"""PPO: arXiv 1707.06347, with the advantages of arXiv 1506.02438 and the reward of InstructGPT, arXiv 2203.02155."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.reference.papers.ragged import Ragged, token_mean


def clip_loss(log_pi: Ragged, log_old: Ragged, A: Sequence[Sequence[float]], epsilon: float) -> Tensor:
    """-L^CLIP, eq. 7 on page 3; the empirical mean over timesteps, E_t, is the mean over tokens."""
    terms = []
    for i in range(len(log_pi)):
        row = []
        for t in range(len(log_pi[i])):
            r = torch.exp(log_pi[i][t] - log_old[i][t])
            row.append(torch.min(r * A[i][t], torch.clamp(r, 1 - epsilon, 1 + epsilon) * A[i][t]))
        terms.append(row)
    return -token_mean(terms)


def value_loss(V: Ragged, V_targ: Sequence[Sequence[float]]) -> Tensor:
    """L^VF = (V(s_t) - V_targ)^2, below eq. 9 on page 5.

    It has no factor of one half: c_1 of eq. 9 is what multiplies it.
    """
    return token_mean([[(V[i][t] - V_targ[i][t]) ** 2 for t in range(len(V[i]))] for i in range(len(V))])


def rewards_with_kl(
    R: Sequence[float], log_old: Sequence[Sequence[float]], log_sft: Sequence[Sequence[float]], beta: float
) -> list[list[float]]:
    """r(x, y) - beta log(pi_RL / pi_SFT), InstructGPT eq. 2 on page 9; the KL penalty falls on each token (page 8)."""
    rewards = [[-beta * (log_old[i][t] - log_sft[i][t]) for t in range(len(log_old[i]))] for i in range(len(R))]
    for i in range(len(R)):
        rewards[i][-1] += R[i]
    return rewards


def gae(rewards: Sequence[float], V: Sequence[float], gamma: float, lam: float, V_after: float = 0.0) -> list[float]:
    """Advantages of one trajectory, arXiv 1506.02438 section 3: eq. 16, sum_k (gamma lam)^k delta_(t+k).

    delta_t = r_t + gamma V(s_(t+1)) - V(s_t). `V_after` is V of the state after the last token, 0 where the response
    ended.
    """
    values = [*V, V_after]
    T = len(rewards)
    delta = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(T)]
    return [sum((gamma * lam) ** k * delta[t + k] for k in range(T - t)) for t in range(T)]


def k_step_advantage(
    rewards: Sequence[float], V: Sequence[float], gamma: float, t: int, k: int, V_after: float = 0.0
) -> float:
    """A_t^(k), arXiv 1506.02438 eq. 14: -V(s_t) + r_t + ... + gamma^(k-1) r_(t+k-1) + gamma^k V(s_(t+k))."""
    values = [*V, V_after]
    return -values[t] + sum(gamma**j * rewards[t + j] for j in range(k)) + gamma**k * values[t + k]


def gae_as_average(
    rewards: Sequence[float], V: Sequence[float], gamma: float, lam: float, V_after: float = 0.0
) -> list[float]:
    """Eq. 16 by its first line: (1 - lam)(A^(1) + lam A^(2) + ...), where A^(k) past the end is A of the whole rest."""
    T = len(rewards)
    out = []
    for t in range(T):
        n = T - t
        steps = [k_step_advantage(rewards, V, gamma, t, k, V_after) for k in range(1, n + 1)]
        out.append((1 - lam) * sum(lam ** (k - 1) * steps[k - 1] for k in range(1, n)) + lam ** (n - 1) * steps[-1])
    return out
