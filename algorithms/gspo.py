"""Group Sequence Policy Optimization: GSPO, arXiv 2507.18071."""

from dataclasses import dataclass

from rlflow import PerSample, PerToken
from rlflow.functional import Aggregation, Bounds, Importance, gspo_is_clipped, gspo_loss

from .grpo import GroupRelative


@dataclass(eq=False)
class GSPO(GroupRelative):
    """GRPO with one ratio a sequence, s = exp(mean_t log r_t), clipped as a whole.

    The surrogate is GSPO-token's, which is GSPO's where a response has one advantage, and takes one for each token too.

    Args:
        clip: How far the ratio of a sequence may leave 1 and still count.
    """

    clip: Bounds = Bounds(3e-4, 4e-4)
    importance: Importance | None = Importance("geometric")
    loss_aggregation: Aggregation = "sequence-mean-token-mean"

    def surrogate(self, logprobs: PerToken, old_logprobs: PerToken, advantages: PerSample, mask: PerToken) -> PerToken:
        given = logprobs, old_logprobs, advantages, mask, self.clip.low, self.clip.high
        self.log("actor/clip_fraction", gspo_is_clipped(*given), mask)
        return gspo_loss(*given)
