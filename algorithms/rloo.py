"""REINFORCE Leave-One-Out: Back to Basics, arXiv 2402.14740."""

from dataclasses import dataclass
from typing import ClassVar

from rlflow import PerSample, node
from rlflow.functional import group_has_signal, rloo_advantages
from rlflow.types import Grouped

from .policy_gradient import Clipped, GroupBaseline, TurnCredit


@dataclass(eq=False)
class RLOO(GroupBaseline, Clipped, TurnCredit):
    """A_i = r_i - mean of the group's other rewards, with r_i the score less beta KL of the whole response."""

    kl_in_reward: ClassVar[bool] = True

    @node
    def advantages(self, rollout: Grouped, rewards: PerSample) -> PerSample:
        self.log("actor/useful_share", group_has_signal(rewards, rollout.group))
        return rloo_advantages(rewards, rollout.group)
