"""REINFORCE, Williams 1992, from what the engine sampled: importance sampling, Precup, Sutton and Singh 2000."""

from dataclasses import dataclass
from typing import ClassVar

from rlflow import PerSample, PerToken
from rlflow.functional import Importance, cispo_loss

from .policy_gradient import Anchor, GroupBaseline, Ratio, TurnCredit
from .rloo import RLOO


@dataclass(eq=False)
class REINFORCE(GroupBaseline, Ratio, TurnCredit):
    """loss_t = -sg(pi_t / rollout_t) A log pi_t, A as RLOO's: no clip, no old policy, and no pass for its logprobs."""

    anchor: Anchor = "rollout"
    importance: Importance | None = None

    kl_in_reward: ClassVar[bool] = True
    unclipped: ClassVar[bool] = True

    advantages = RLOO.advantages

    def surrogate(self, logprobs: PerToken, old_logprobs: PerToken, advantages: PerSample, mask: PerToken) -> PerToken:
        return cispo_loss(logprobs, old_logprobs, advantages, clip_high=float("inf"))
