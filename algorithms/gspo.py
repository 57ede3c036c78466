"""Group Sequence Policy Optimization: GSPO, arXiv 2507.18071."""

from dataclasses import dataclass

from rlflow import PerSample, PerToken
from rlflow.functional import Aggregation, Bounds, Importance, gspo_is_clipped, gspo_loss

from .grpo import GroupRelative


@dataclass(eq=False)
class GSPO(GroupRelative):
    """GRPO with one ratio for each response, the geometric mean of its tokens' ratios, clipped as a whole.

        s_i  = exp(mean_t log(pi_it / old_it))
        s_it = sg(s_i) pi_it / sg(pi_it)                                               sg: no gradient
        surrogate_it = -min(s_it A_i, clip(s_it, 1 - clip.low, 1 + clip.high) A_i)

    This is GSPO-token, equations 13 and 14. Its mean over a response's tokens has the value and the gradient of GSPO,
    equations 5 and 7, and it allows an advantage for each token, too.

    Args:
        clip: Range around 1 to which the ratio of a response is clipped; much smaller than for a token's ratio.
    """

    clip: Bounds = Bounds(3e-4, 4e-4)
    importance: Importance | None = Importance("geometric")
    loss_aggregation: Aggregation = "sequence-mean-token-mean"

    def surrogate(self, logprobs: PerToken, old_logprobs: PerToken, advantages: PerSample, mask: PerToken) -> PerToken:
        given = logprobs, old_logprobs, advantages, mask, self.clip.low, self.clip.high
        self.log("actor/clip_fraction", gspo_is_clipped(*given), mask)
        return gspo_loss(*given)
