"""Estimators of the Kullback-Leibler divergence from a reference, from one sampled token each."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from rlflow.errors import UserError
from rlflow.functional.ratios import log_ratio

KLEstimator = Literal["k1", "k2", "k3", "abs", "k3+", "k3-ratio"]


def kl_estimate(
    logprobs: Tensor, ref_logprobs: Tensor, kind: KLEstimator = "k3-ratio", old_logprobs: Tensor | None = None
) -> Tensor:
    """An estimate of `KL(pi || ref)` at each token; with `d = log pi - log ref` of the token, sampled from `pi`:

        k1          d                   unbiased value; as a loss its expected gradient is 0
        k2          d^2 / 2             biased value; as a loss its expected gradient is that of KL(pi || ref)
        k3          exp(-d) - 1 + d     unbiased value, never negative; as a loss the gradient of KL(ref || pi)
        abs         |d|
        k3+         the value of k3 with the gradient of k2 (straight-through)
        k3-ratio    (pi / old) k3       value and gradient of KL(pi || ref) where `old` sampled the token

    After the first update of a step the tokens are `old`'s and no longer `pi`'s: of these kinds k3-ratio alone has the
    right gradient then, `(pi / old) d grad log pi` of each token, and before it k2, k3+ and k3-ratio have the same one.
    So k3-ratio is the right choice in a loss, and k1, detached, in a reward (arXiv 2512.21852).

    The estimators are John Schulman's, http://joschu.net/blog/kl-approx.html; k3 is the one in GRPO's equation 4, arXiv
    2402.03300, k3-ratio that of DeepSeek-V3.2, arXiv 2512.02556. `ref_logprobs` and `old_logprobs` are detached; the
    result is differentiable in `logprobs`. The log ratios of k3 and its like are clamped, see `log_ratio`.

    Args:
        logprobs: `[B, T]` of the policy.
        ref_logprobs: `[B, T]` of the reference, for the same tokens.
        kind: The estimator.
        old_logprobs: `[B, T]` of the policy that sampled, which k3-ratio reads; None where that is `pi` itself.

    Returns:
        `[B, T]`.

    Raises:
        UserError: The estimator does not exist.
    """
    d = logprobs - ref_logprobs.detach()
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        return _k3(logprobs, ref_logprobs)
    if kind == "abs":
        return d.abs()
    if kind == "k3+":
        k2 = d.square() / 2
        return _k3(logprobs, ref_logprobs).detach() + (k2 - k2.detach())
    if kind == "k3-ratio":
        old = logprobs if old_logprobs is None else old_logprobs
        return log_ratio(logprobs, old).exp() * _k3(logprobs, ref_logprobs)
    raise UserError(f"KL estimator {kind!r} does not exist; choose one of {', '.join(get_args(KLEstimator))}")


def _k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    d = log_ratio(logprobs, ref_logprobs)
    return (-d).expm1() + d  # exp(-d) - 1 would lose all digits of a small d
