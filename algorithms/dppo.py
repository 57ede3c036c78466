"""Divergence Proximal Policy Optimization, by the binary total variation: DPPO, arXiv 2602.04879."""

from dataclasses import dataclass

from rlflow import PerSample, PerToken, UserError
from rlflow.functional import Importance, cispo_loss, dppo_tv_mask

from .grpo import GroupRelative
from .policy_gradient import Anchor


@dataclass(eq=False)
class DPPO(GroupRelative):
    """GRPO that drops a token whose probability has moved by more than delta and would move on; A_i = r_i - mean_g.

    Args:
        delta: The difference of probabilities, from 0 to 1, up to which every token counts.
    """

    anchor: Anchor = "rollout"
    importance: Importance | None = None
    normalize_std: bool = False
    delta: float = 0.15

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.delta <= 1:
            raise UserError(f"`delta` is {self.delta}, and bounds a difference of probabilities; give 0 to 1")

    def surrogate(self, logprobs: PerToken, old_logprobs: PerToken, advantages: PerSample, mask: PerToken) -> PerToken:
        counts = dppo_tv_mask(logprobs, old_logprobs, advantages, self.delta)
        self.log("actor/clip_fraction", 1 - counts, mask)
        return counts * cispo_loss(logprobs, old_logprobs, advantages, clip_high=float("inf"))
