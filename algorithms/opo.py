"""On-Policy RL with Optimal reward baseline: OPO, arXiv 2505.23585."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

from rlflow import PerSample, PerToken, node
from rlflow.functional import group_has_signal, opo_advantages
from rlflow.types import Grouped

from .policy_gradient import Clipped, GroupBaseline, Scored


class GroupedTurns(Grouped, Protocol):
    """The fields of a rollout that the baseline reads."""

    @property
    def turn(self) -> PerToken:
        """`[B, T]`, number of the turn that wrote each token; -1 if the policy did not write it."""

    @property
    def inherited_mask(self) -> PerToken:
        """`[B, T]` bool, True on tokens that an earlier row of the episode has too."""


@dataclass(eq=False)
class OPO(GroupBaseline, Clipped, Scored):
    """A_i = r_i - sum_j l_j r_j / sum_j l_j over the group, weighted by the lengths l in tokens; exactly on-policy.

    Rewards 1 and 0 of responses of 30 and 10 tokens have the baseline 0.75, so the advantages 0.25 and -0.75. A token
    that several rows of an episode have counts in the first of them. A step makes one update:
    `actor.samples_per_update` and `actor.epochs` above 1 are refused.
    """

    one_update: ClassVar[bool] = True

    @node
    def advantages(self, rollout: GroupedTurns, rewards: PerSample) -> PerSample:
        self.log("actor/useful_share", group_has_signal(rewards, rollout.group), rollout.first)
        lengths = ((rollout.turn >= 0) & ~rollout.inherited_mask).sum(dim=1)
        return opo_advantages(rewards, lengths, rollout.group)
