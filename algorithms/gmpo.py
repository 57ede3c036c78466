"""Geometric-Mean Policy Optimization: GMPO, arXiv 2507.20673."""

import math
from dataclasses import dataclass

from rlflow import PerSample, PerToken
from rlflow.functional import Aggregation, Bounds, Importance, gmpo_loss, ppo_is_clipped

from .grpo import GRPO
from .policy_gradient import GroupBaseline, Ratio, Scored


@dataclass(eq=False)
class GMPO(GroupBaseline, Ratio, Scored):
    """GRPO with the geometric mean of the clipped ratios of a sequence's tokens.

    Args:
        normalize_std: Divide advantages by std_g.
        clip: How far the log ratio may leave 0 and still count.
    """

    normalize_std: bool = True
    clip: Bounds = Bounds(0.4, 0.4)
    importance: Importance | None = Importance("geometric")
    loss_aggregation: Aggregation = "sequence-mean-token-mean"

    advantages = GRPO.advantages

    def surrogate(self, logprobs: PerToken, old_logprobs: PerToken, advantages: PerSample, mask: PerToken) -> PerSample:
        clips = 1 - math.exp(-self.clip.low), math.exp(self.clip.high) - 1  # of the ratio
        self.log("actor/clip_fraction", ppo_is_clipped(logprobs, old_logprobs, advantages, *clips), mask)
        return gmpo_loss(logprobs, old_logprobs, advantages, mask, self.clip.low, self.clip.high)
