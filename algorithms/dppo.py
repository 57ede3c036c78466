"""Divergence Proximal Policy Optimization, by the binary total variation: DPPO, arXiv 2602.04879."""

from dataclasses import dataclass

from rlflow import PerSample, PerToken, UserError
from rlflow.functional import Importance, cispo_loss, dppo_tv_mask

from .grpo import GroupRelative
from .policy_gradient import Anchor


@dataclass(eq=False)
class DPPO(GroupRelative):
    """GRPO that drops a token whose probability has moved by more than delta and would move further.

        A_i = r_i - mean_g
        surrogate_t = -M_t sg(r_t) A_i log pi_t,    r_t = pi_t / rollout_t        sg: no gradient
        M_t = 0 where |pi_t - rollout_t| > delta, and r_t > 1 with A_i > 0 or r_t < 1 with A_i < 0;    else 1

    Equations 12 and 13. At the default delta a token that went from 0.001 to 0.1 counts, with a ratio of 100; one with
    a positive advantage that went from 0.5 to 0.7 is dropped, with a ratio of 1.4.

    Args:
        delta: The difference of probabilities, from 0 to 1, up to which no token is masked.
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
