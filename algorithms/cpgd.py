"""Clipped Policy Gradient with Policy Drift: CPGD, arXiv 2505.12504."""

from dataclasses import dataclass
from typing import ClassVar

from rlflow import PerSample, PerToken, UserError
from rlflow.functional import cpgd_drift, cpgd_loss, ppo_is_clipped

from .grpo import GRPO


@dataclass(eq=False)
class CPGD(GRPO):
    """GRPO with log pi in place of the ratio, clipped where the ratio would be, and a drift term that holds it.

    Args:
        drift_coef: Weight of the policy drift from the start of the step.
    """

    drift_coef: float = 1e-4

    unused: ClassVar[tuple[str, ...]] = ("dual_clip",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drift_coef < 0:
            raise UserError(f"`drift_coef` is {self.drift_coef}; give 0 or more")
        if not self.clip_low < 1:
            raise UserError(f"`clip_low` is {self.clip_low}, and CPGD takes log(1 - clip_low); give less than 1")

    def surrogate(self, logprobs: PerToken, old_logprobs: PerToken, advantages: PerSample, mask: PerToken) -> PerToken:
        clips = self.clip_low, self.clip_high
        self.log("actor/clip_fraction", ppo_is_clipped(logprobs, old_logprobs, advantages, *clips), mask)
        drift = cpgd_drift(logprobs, old_logprobs)
        self.log("actor/drift", drift.detach(), mask)
        return cpgd_loss(logprobs, old_logprobs, advantages, *clips) + self.drift_coef * drift
