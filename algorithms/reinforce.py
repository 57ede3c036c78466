"""REINFORCE, Williams 1992, from what the engine sampled: importance sampling, Precup, Sutton and Singh 2000."""

from dataclasses import dataclass
from typing import ClassVar

from rlflow import PerSample, PerToken
from rlflow.functional import Importance, cispo_loss

from .policy_gradient import Anchor, GroupBaseline, Ratio, TurnCredit
from .rloo import RLOO


@dataclass(eq=False)
class REINFORCE(GroupBaseline, Ratio, TurnCredit):
    """surrogate_t = -sg(pi_t / rollout_t) A_i log pi_t with RLOO's A_i: no clip and no forward pass for old logprobs.

    The weight corrects for the difference between trainer and engine token by token, the first-order part of the exact
    correction, a product over tokens. Nothing holds the policy near the one that sampled: for several updates a step or
    samples of older weights choose an algorithm with a clip or a mask.
    """

    anchor: Anchor = "rollout"
    importance: Importance | None = None

    kl_in_reward: ClassVar[bool] = True
    unclipped: ClassVar[bool] = True

    advantages = RLOO.advantages

    def surrogate(self, logprobs: PerToken, old_logprobs: PerToken, advantages: PerSample, mask: PerToken) -> PerToken:
        return cispo_loss(logprobs, old_logprobs, advantages, clip_high=float("inf"))
