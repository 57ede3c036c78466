"""On-Policy RL with Optimal reward baseline: OPO, arXiv 2505.23585."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

from rlflow import PerSample, node
from rlflow.functional import group_has_signal, opo_advantages
from rlflow.types import Grouped

from .policy_gradient import Clipped, PolicyLengths, Scored


class GroupedLengths(PolicyLengths, Grouped, Protocol):
    """What the baseline reads: whose samples they are, and how much of them the policy wrote."""


@dataclass(eq=False)
class OPO(Clipped, Scored):
    """A_i = r_i - sum_j l_j r_j / sum_j l_j over the group, weighted by lengths l; exactly on-policy.

    Args:
        group_size: Responses to each prompt, at least 2.
    """

    group_size: int = 8

    compares_group: ClassVar[bool] = True
    one_update: ClassVar[bool] = True

    @node
    def advantages(self, rollout: GroupedLengths, rewards: PerSample) -> PerSample:
        self.log("actor/useful_share", group_has_signal(rewards, rollout.group))
        return opo_advantages(rewards, rollout.policy_lengths, rollout.group)
