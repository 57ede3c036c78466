"""Geometric-Mean Policy Optimization: GMPO, arXiv 2507.20673."""

import math
from dataclasses import dataclass
from typing import ClassVar

from rlflow import PerSample, PerToken
from rlflow.functional import Aggregation, Bounds, Importance, gmpo_loss, ppo_is_clipped

from .grpo import GRPO


@dataclass(eq=False)
class GMPO(GRPO):
    """GRPO with the geometric mean of the clipped ratios of a sequence's tokens.

    Args:
        clip: How far the log ratio may leave 0 and still count.
    """

    clip: Bounds = Bounds(0.4, 0.4)
    importance: Importance | None = Importance("geometric")
    loss_aggregation: Aggregation = "sequence-mean-token-mean"

    unused: ClassVar[tuple[str, ...]] = ("advantages_at", "loss_aggregation")

    def surrogate(self, logprobs: PerToken, old_logprobs: PerToken, advantages: PerSample, mask: PerToken) -> PerSample:
        clips = 1 - math.exp(-self.clip.low), math.exp(self.clip.high) - 1  # of the ratio
        self.log("actor/clip_fraction", ppo_is_clipped(logprobs, old_logprobs, advantages, *clips), mask)
        return gmpo_loss(logprobs, old_logprobs, advantages, mask, self.clip.low, self.clip.high)
