"""Off-policy sequence masking: GRPO as in DeepSeek-V3.2, arXiv 2512.02556, section 3.1."""

from dataclasses import dataclass

from rlflow import PerSample, PerToken
from rlflow.functional import Aggregation, Importance, off_policy_sequence_mask

from .grpo import GRPO
from .policy_gradient import Anchor


@dataclass(eq=False)
class OffPolicySequenceMasking(GRPO):
    """GRPO without the responses whose advantage is negative and which the policy has become unlikely to give.

        A_i = r_i - mean_g
        surrogate_it = -M_i min(r_it A_i, clip(r_it, 1 - clip.low, 1 + clip.high) A_i),    r_it = pi_it / rollout_it
        M_i = 0 where A_i < 0 and mean_t(log rollout_it - log pi_it) > delta,    else 1

    Equation 9. KL to the reference is not masked. `actor/masked_fraction` is the share of tokens that M drops.

    Args:
        delta: The mean of log rollout - log pi over a response's tokens, in nats a token, up to which the response is
            not masked. 0.5 is a mean ratio of 1.6.
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
