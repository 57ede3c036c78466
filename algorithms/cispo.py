"""Clipped importance-sampling weights: CISPO of MiniMax-M1, arXiv 2506.13585."""

from dataclasses import dataclass

from rlflow import PerSample, PerToken
from rlflow.functional import cispo_loss, log_ratio

from .grpo import GroupRelative


@dataclass(eq=False)
class CISPO(GroupRelative):
    """GRPO whose ratio weights log pi and is capped, in place of PPO's clip: no token loses its gradient.

        surrogate_t = -sg(min(r_t, 1 + clip_high)) A_i log pi_t,    r_t = pi_t / old_t        sg: no gradient

    Equations 4 and 5, without a lower end. Only the weight is capped: with the default it is at most 5.
    `actor/clip_fraction` is the share of tokens whose ratio is above the cap.

    Args:
        clip_high: Highest weight of a token, less 1.
    """

    clip_high: float = 4.0

    def surrogate(self, logprobs: PerToken, old_logprobs: PerToken, advantages: PerSample, mask: PerToken) -> PerToken:
        capped = log_ratio(logprobs.detach(), old_logprobs).exp() > 1 + self.clip_high
        self.log("actor/clip_fraction", capped.to(logprobs.dtype), mask)
        return cispo_loss(logprobs, old_logprobs, advantages, self.clip_high)
