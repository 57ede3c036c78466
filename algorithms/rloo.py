"""REINFORCE Leave-One-Out: Back to Basics, arXiv 2402.14740."""

from dataclasses import dataclass
from typing import ClassVar

from rlflow import PerSample, node
from rlflow.functional import group_has_signal, rloo_advantages
from rlflow.types import Grouped

from .policy_gradient import Clipped, GroupBaseline, TurnCredit


@dataclass(eq=False)
class RLOO(GroupBaseline, Clipped, TurnCredit):
    """A_i = R_i - mean of the group's other R, where R_i = r_i - kl.coef sum_t k1_t has KL of the whole response.

    Four responses with R of 1, 0, 0, 0 have the advantages 1 and three times -1/3. The loss is PPO's clipped one; with
    one update a step and `loss_aggregation: sequence-mean-token-sum` its gradient is the paper's.
    """

    kl_in_reward: ClassVar[bool] = True

    @node
    def advantages(self, rollout: Grouped, rewards: PerSample) -> PerSample:
        self.log("actor/useful_share", group_has_signal(rewards, rollout.group), rollout.first)
        return rloo_advantages(rewards, rollout.group, rollout.episode)
