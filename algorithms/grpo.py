"""Group Relative Policy Optimization: DeepSeekMath, arXiv 2402.03300."""

from dataclasses import dataclass
from typing import ClassVar

from rlflow import PerSample, node
from rlflow.functional import group_has_signal, group_normalized_advantages
from rlflow.types import Grouped

from .policy_gradient import Clipped, Ratio, TurnCredit


@dataclass(eq=False)
class GroupRelative(Ratio, TurnCredit):
    """A_i = (r_i - mean_g) / std_g over the group g of a prompt, for GRPO and what differs from it by the surrogate.

    Args:
        group_size: Responses to each prompt, at least 2.
        normalize_std: Divide advantages by std_g.
    """

    group_size: int = 8
    normalize_std: bool = True

    compares_group: ClassVar[bool] = True

    @node
    def advantages(self, rollout: Grouped, rewards: PerSample) -> PerSample:
        self.log("actor/useful_share", group_has_signal(rewards, rollout.group))
        return group_normalized_advantages(rewards, rollout.group, self.normalize_std)


@dataclass(eq=False)
class GRPO(GroupRelative, Clipped):
    """A_i = (r_i - mean_g) / std_g over the group g of a prompt; PPO's clipped loss, KL to a frozen reference."""
