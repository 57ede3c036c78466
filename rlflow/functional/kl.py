"""Estimators of the Kullback-Leibler divergence from a reference, from one sampled token each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from torch import Tensor

from rlflow.errors import UserError
from rlflow.functional.ratios import log_ratio

KLEstimator = Literal["k1", "k2", "k3", "abs", "k3+", "k3-ratio"]
MOST = 1e9  # of a coefficient


@dataclass(frozen=True)
class KL:
    """How the divergence from a reference restrains a policy.

    Attributes:
        coef: Its weight; 0 leaves the reference out.
        kind: Its estimator; None for k1 in a reward and k3-ratio in a loss, which have the gradient of KL (arXiv
            2512.21852), or for the algorithm's own.
        in_reward: Take the divergence off the rewards instead of adding it to the loss; None for as the algorithm does.
        target: Adapt `coef` to hold the divergence per token here (arXiv 1909.08593), in the reward; None is off.
        horizon: Samples over which `coef` adapts.
    """

    coef: float = 0.0
    kind: KLEstimator | None = None
    in_reward: bool | None = None
    target: float | None = None
    horizon: float = 10_000.0

    def __post_init__(self) -> None:
        if not 0 <= self.coef <= MOST:
            raise UserError(f"`kl.coef` is {self.coef}; give 0 or more, at most {MOST:g}")
        if self.kind not in (None, *get_args(KLEstimator)):
            raise UserError(f"`kl.kind` is {self.kind!r}; give one of {', '.join(get_args(KLEstimator))}")
        if self.coef > 0 and self.in_reward is True and self.kind == "k3-ratio":
            raise UserError(
                "`kl.kind` is 'k3-ratio' and `kl.in_reward` is true, but its ratio is for the gradient of a loss; set"
                " `kl.kind` to 'k1', whose gradient in a reward is that of KL"
            )
        if self.coef > 0 and self.in_reward is False and self.kind == "k1":
            raise UserError(
                "`kl.kind` is 'k1' and `kl.in_reward` is false, but the expected gradient of k1 in a loss is 0; set"
                " `kl.kind` to 'k3-ratio', or `kl.in_reward` to true"
            )
        if self.target is not None and self.in_reward is False:
            raise UserError(f"`kl.target` is {self.target}, and adapts KL in the reward; set `kl.in_reward` to true")
        if self.target is not None and not (self.target > 0 and self.coef > 0):
            raise UserError(
                f"`kl.target` is {self.target} and `kl.coef` is {self.coef}, which is adapted by multiplication; give"
                " both more than 0"
            )
        if not self.horizon > 0:
            raise UserError(f"`kl.horizon` is {self.horizon}; it is a number of samples above 0")

    def filled(self, in_reward: bool, in_loss: KLEstimator) -> KL:
        """With what is None as an algorithm has it.

        Args:
            in_reward: Where its divergence stands.
            in_loss: Its estimator in a loss.
        """
        there = in_reward if self.in_reward is None else self.in_reward
        return replace(self, in_reward=there, kind=self.kind or ("k1" if there else in_loss))

    @property
    def restrains_reward(self) -> bool:
        """Whether the divergence comes off the rewards."""
        return bool(self.in_reward) and self.coef > 0

    def estimate(self, logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor | None = None) -> Tensor:
        """`kl_estimate` of this kind."""
        kind = self.filled(in_reward=False, in_loss="k3-ratio").kind
        assert kind is not None
        return kl_estimate(logprobs, ref_logprobs, kind, old_logprobs)


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
