"""Clipped importance-sampling weights: CISPO of MiniMax-M1, arXiv 2506.13585."""

from dataclasses import dataclass

from rlflow import PerSample, PerToken
from rlflow.functional import cispo_loss, log_ratio

from .grpo import GroupRelative


@dataclass(eq=False)
class CISPO(GroupRelative):
    """GRPO whose ratio weights the token and is capped at 1 + clip_high; no token loses its gradient.

    Args:
        clip_high: How far above 1 a weight may be.
    """

    clip_high: float = 4.0

    def surrogate(self, logprobs: PerToken, old_logprobs: PerToken, advantages: PerSample, mask: PerToken) -> PerToken:
        capped = log_ratio(logprobs.detach(), old_logprobs).exp() > 1 + self.clip_high
        self.log("actor/clip_fraction", capped.to(logprobs.dtype), mask)
        return cispo_loss(logprobs, old_logprobs, advantages, self.clip_high)
