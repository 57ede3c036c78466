"""Clipped Policy Gradient with Policy Drift: CPGD, arXiv 2505.12504."""

from dataclasses import dataclass, field
from typing import Literal

from rlflow import PerSample, PerToken, UserError, node
from rlflow.functional import (
    Bounds,
    cpgd_drift,
    cpgd_loss,
    group_has_signal,
    group_normalized_advantages,
    kl_estimate,
    ppo_is_clipped,
)
from rlflow.types import Grouped

from .policy_gradient import GroupBaseline, Ratio, TurnCredit

Weight = Literal["std", "filter", "none"]


@dataclass(eq=False)
class CPGD(GroupBaseline, Ratio, TurnCredit):
    """GRPO with log pi in place of the ratio, clipped over the same range, and a drift term that pulls pi back to old.

        A_i = w (r_i - mean_g)
        surrogate_t = -min(A_i log pi_t, A_i clip(log pi_t, log(old_t (1 - clip.low)), log(old_t (1 + clip.high))))
                      + drift_coef min(sg(pi_t / old_t) - 1, drift_clip) log pi_t            sg: no gradient

    The drift is that of equation 2; where it is not clipped, its gradient is that of KL(old || pi). `actor/drift` logs
    an estimate of this divergence, which the value of the term is not.

    Args:
        clip: Range around 1 to which the ratio is clipped.
        weight: The factor w of a prompt's advantages. `std`: 1 / (standard deviation of the prompt's rewards).
            `filter`: number of groups / number of groups whose rewards differ, at most `weight_cap`. So groups of equal
            rewards do not make the step smaller. `none`: 1.
        weight_cap: The largest w of `filter`; 1 or more.
        drift_coef: Weight of the drift from the policy at the start of the step; 0 is off.
        drift_clip: The largest factor of log pi in the drift; more than 0.
    """

    clip: Bounds = Bounds()
    weight: Weight = "std"
    weight_cap: float = 3.0
    drift_coef: float = 0.01
    drift_clip: float = 2.0
    anchor: Literal["old"] = field(default="old", init=False)  # the gradient has no ratio that could correct

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drift_coef < 0:
            raise UserError(f"`drift_coef` is {self.drift_coef}; give 0 or more")
        if not self.drift_clip > 0:
            raise UserError(f"`drift_clip` is {self.drift_clip}; give more than 0, such as 2")
        if not self.weight_cap >= 1:
            raise UserError(f"`weight_cap` is {self.weight_cap}, and the weights that it cuts are 1 or more; raise it")
        if not self.clip.low < 1:
            raise UserError(f"`clip.low` is {self.clip.low}, and CPGD takes log(1 - clip.low); give less than 1")

    @node
    def advantages(self, rollout: Grouped, rewards: PerSample) -> PerSample:
        has_signal = group_has_signal(rewards, rollout.group)
        self.log("actor/useful_share", has_signal, rollout.first)
        advantages = group_normalized_advantages(rewards, rollout.group, self.weight == "std", episode=rollout.episode)
        if self.weight != "filter":
            return advantages
        weight = (1 / self.mean(has_signal, rollout.first).clamp(min=1e-12)).clamp(max=self.weight_cap)
        return advantages * weight.to(advantages.dtype)

    def surrogate(self, logprobs: PerToken, old_logprobs: PerToken, advantages: PerSample, mask: PerToken) -> PerToken:
        clips = self.clip.low, self.clip.high
        self.log("actor/clip_fraction", ppo_is_clipped(logprobs, old_logprobs, advantages, *clips), mask)
        self.log("actor/drift", kl_estimate(old_logprobs, logprobs.detach(), "k3"), mask)
        drift = cpgd_drift(logprobs, old_logprobs, self.drift_clip)
        return cpgd_loss(logprobs, old_logprobs, advantages, *clips) + self.drift_coef * drift
