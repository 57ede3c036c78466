"""The surrogate losses of the papers, over the tokens of one response: lists in, one 0-dim tensor a token out.

`new` are the logprobs of the policy in training and carry the gradient; `old` and the advantages `A` are numbers.
Methods with one ratio for the whole response repeat its loss on every token: the mean over the tokens is the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Tokens = Sequence[Tensor]
Numbers = Sequence[float]


def ppo(new: Tokens, old: Numbers, A: Numbers, low: float, high: float, dual: float | None = None) -> list[Tensor]:
    """`-min(r A, clip(r, 1 - low, 1 + high) A)`: PPO, arXiv 1707.06347, equation 7; DAPO, arXiv 2503.14476, eq. 10.

    With `dual`, for `A < 0`, `-max(min(...), dual A)`: dual-clip PPO, arXiv 1912.09729, equation 5.
    """
    losses = []
    for n, o, a in zip(new, old, A, strict=True):
        r = torch.exp(n - o)
        inside = r if 1 - low <= r.item() <= 1 + high else torch.full_like(r, 1 - low if r.item() < 1 else 1 + high)
        objective = min(r * a, inside * a, key=Tensor.item)
        if dual is not None and a < 0:
            objective = max(objective, torch.full_like(r, dual * a), key=Tensor.item)
        losses.append(-objective)
    return losses


def policy_gradient(new: Tokens, A: Numbers) -> list[Tensor]:
    """`-A log pi`: REINFORCE, and GPG, arXiv 2504.02546, equation 4."""
    return [-a * n for n, a in zip(new, A, strict=True)]


def cispo(new: Tokens, old: Numbers, A: Numbers, high: float) -> list[Tensor]:
    """`-sg(min(r, 1 + high)) A log pi`: CISPO of MiniMax-M1, arXiv 2506.13585, equations 4 and 5, no lower end."""
    return [-min(math.exp(n.item() - o), 1 + high) * a * n for n, o, a in zip(new, old, A, strict=True)]


def cpgd(new: Tokens, old: Numbers, A: Numbers, low: float, high: float, drift: float, c: float) -> list[Tensor]:
    """`-min(A ln r, A clip(ln r, ln(1 - low), ln(1 + high))) + drift E`, `E = min(r - 1, c) ln pi`, `r - 1` a number.

    CPGD, arXiv 2505.12504, equation 2. Written with `ln r` where the paper has it; `ln pi` instead shifts the loss by a
    constant.
    """
    losses = []
    for n, o, a in zip(new, old, A, strict=True):
        log_r = n - o
        inside = torch.clip(log_r, math.log(1 - low), math.log(1 + high))
        objective = min(a * log_r, a * inside, key=Tensor.item)
        losses.append(-objective + drift * min(math.exp(log_r.item()) - 1, c) * n)
    return losses


def gspo_token(new: Tokens, old: Numbers, A: Numbers, low: float, high: float) -> list[Tensor]:
    """`-min(s_t A_t, clip(s_t, 1 - low, 1 + high) A_t)`, `s_t = sg(s) pi_t / sg(pi_t)`: GSPO, arXiv 2507.18071, eq. 13.

    With `s` the ratio of the sequence as in `gspo`, and an advantage for each token.
    """
    s = math.exp(math.fsum(n.item() - o for n, o in zip(new, old, strict=True)) / len(new))
    losses = []
    for n, a in zip(new, A, strict=True):
        s_t = s * torch.exp(n - n.item())
        inside = s_t if 1 - low <= s <= 1 + high else torch.full_like(s_t, 1 - low if s < 1 else 1 + high)
        losses.append(-min(s_t * a, inside * a, key=Tensor.item))
    return losses


def gspo(new: Tokens, old: Numbers, A: float, low: float, high: float) -> list[Tensor]:
    """`-min(s A, clip(s) A)`, `s = (prod_t r_t)^(1/T)`: GSPO, arXiv 2507.18071, equations 5 and 7."""
    ratios = [torch.exp(n - o) for n, o in zip(new, old, strict=True)]
    s = math.prod(ratios[1:], start=ratios[0]) ** (1 / len(ratios))
    (loss,) = ppo([torch.log(s)], [0.0], [A], low, high)
    return [loss] * len(ratios)


def gmpo(new: Tokens, old: Numbers, A: float, low: float, high: float) -> list[Tensor]:
    """`-(prod_t |min(r_t A, clip(r_t, e^-low, e^high) A)|)^(1/T) sgn A`: GMPO, arXiv 2507.20673, equation 4."""
    if A == 0:
        return [0 * n for n in new]
    product = torch.ones((), dtype=torch.float64)
    for n, o in zip(new, old, strict=True):
        r = torch.exp(n - o)
        product = product * min(r * A, torch.clip(r, math.exp(-low), math.exp(high)) * A, key=Tensor.item).abs()
    loss = -(product ** (1 / len(new))) * math.copysign(1, A)
    return [loss] * len(new)


def importance(old: Numbers, rollout: Numbers, level: str, mode: str, low: float, high: float) -> list[float]:
    """Weights of the loss for tokens that another policy sampled; truncated (arXiv 1802.01561) or IcePop's.

    Args:
        old: Logprobs of the trainer.
        rollout: Logprobs of the sampler.
        level: `token`, or the `sequence`'s ratio, or the `geometric` mean of the tokens' ratios, on every token.
        mode: `truncate` at `high`, or `mask`: 0 outside `low` to `high` (arXiv 2510.18855).
        low: The smallest weight that `mask` keeps.
        high: The largest weight.
    """
    ratios = [math.exp(o - r) for o, r in zip(old, rollout, strict=True)]
    if level == "sequence":
        ratios = [math.prod(ratios)] * len(ratios)
    elif level == "geometric":
        ratios = [math.prod(ratios) ** (1 / len(ratios))] * len(ratios)
    else:
        assert level == "token", level
    if mode == "truncate":
        return [min(ratio, high) for ratio in ratios]
    assert mode == "mask", mode
    return [ratio if low <= ratio <= high else 0.0 for ratio in ratios]


def divergence(new: Tensor, ref: float, kind: str, old: float | None = None) -> Tensor:
    """An estimate of `KL(pi || ref)` at a token that `pi`, or for k3-ratio `old`, sampled.

    http://joschu.net/blog/kl-approx.html, and k3-ratio of DeepSeek-V3.2, arXiv 2512.02556, section 3.1.
    """
    log_ratio = ref - new  # log r there
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return 0.5 * log_ratio**2
    if kind == "k3":
        return (torch.exp(log_ratio) - 1) - log_ratio
    if kind == "abs":
        return torch.abs(log_ratio)
    if kind == "k3+":  # the value of k3, the gradient of k2, which is the log ratio
        return ((torch.exp(log_ratio) - 1) - log_ratio).detach() - log_ratio.detach() * (new - new.detach())
    if kind == "k3-ratio":  # pi / old (ref / pi - ln(ref / pi) - 1)
        return torch.exp(new - (new.item() if old is None else old)) * (torch.exp(log_ratio) - log_ratio - 1)
    raise ValueError(kind)


def value(new: Tokens, old: Numbers, returns: Numbers, clip: float | None) -> list[Tensor]:
    """`max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2`: the critic's loss, described in arXiv 2005.12729."""
    losses = []
    for v, o, target in zip(new, old, returns, strict=True):
        squares = [(v - target) ** 2]
        if clip is not None:
            squares.append((torch.clip(v, o - clip, o + clip) - target) ** 2)
        losses.append(max(squares, key=Tensor.item) / 2)
    return losses
