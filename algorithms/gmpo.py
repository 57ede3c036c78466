"""Geometric-Mean Policy Optimization: GMPO, arXiv 2507.20673."""

import math
from dataclasses import dataclass

from rlflow import PerSample, PerToken
from rlflow.functional import Aggregation, Bounds, Importance, gmpo_loss, ppo_is_clipped

from .grpo import GRPO
from .policy_gradient import GroupBaseline, Ratio, Scored


@dataclass(eq=False)
class GMPO(GroupBaseline, Ratio, Scored):
    """GRPO with the geometric mean of the clipped ratios of a response's tokens; one number for each response.

        surrogate_i = -A_i exp(mean_t c_t),    c_t = min(log r_t, clip.high)  where A_i > 0
                                               c_t = max(log r_t, -clip.low)  elsewhere

    Equation 4, with r_t = pi_t / old_t. The clip is of log ratios: 0.4 both ways is a ratio from 0.67 to 1.49.

    Args:
        normalize_std: Divide advantages by the standard deviation of the group's rewards.
        clip: Range around 0 to which the log ratio of a token is clipped.
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
