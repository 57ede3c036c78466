"""Off-policy sequence masking: GRPO as in DeepSeek-V3.2, arXiv 2512.02556, section 3.1."""

from dataclasses import dataclass

from rlflow import PerSample, PerToken
from rlflow.functional import Aggregation, Importance, off_policy_sequence_mask

from .grpo import GRPO
from .policy_gradient import Anchor


@dataclass(eq=False)
class OffPolicySequenceMasking(GRPO):
    """GRPO that drops bad responses which the policy would hardly give any more; A_i = r_i - mean_g.

    Args:
        delta: The mean of log rollout - log pi over a response, in nats a token, up to which it counts.
    """

    anchor: Anchor = "rollout"
    importance: Importance | None = None
    normalize_std: bool = False
    loss_aggregation: Aggregation = "sequence-mean-token-mean"
    delta: float = 0.5

    def surrogate(self, logprobs: PerToken, old_logprobs: PerToken, advantages: PerSample, mask: PerToken) -> PerToken:
        counts = off_policy_sequence_mask(logprobs, old_logprobs, advantages, mask, self.delta)
        self.log("actor/masked_fraction", 1 - counts, mask)
        return counts * super().surrogate(logprobs, old_logprobs, advantages, mask)
