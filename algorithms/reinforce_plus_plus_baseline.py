"""REINFORCE++ with baseline, arXiv 2501.03262, section 3: the group's mean, then the whole batch's deviation."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

from rlflow import PerSample, PerToken, node
from rlflow.functional import KLEstimator, group_has_signal, group_normalized_advantages
from rlflow.types import Grouped, WithLossMask

from .policy_gradient import Clipped, GroupBaseline, Scored


class MaskedGroups(WithLossMask, Grouped, Protocol):
    """The fields of a rollout that the advantages read: which prompt a sample answers, and which tokens count."""


@dataclass(eq=False)
class REINFORCEPlusPlusBaseline(GroupBaseline, Clipped, Scored):
    """A_it = (r_i - mean_g - mean) / std, where mean and std are over all tokens of the step; KL as k2 in the loss.

    A response of T tokens counts T times in mean and std, which are those of all ranks' rows together.
    """

    kl_in_loss: ClassVar[KLEstimator] = "k2"

    @node
    def advantages(self, rollout: MaskedGroups, rewards: PerSample) -> PerToken:
        self.log("actor/useful_share", group_has_signal(rewards, rollout.group), rollout.first)
        centred = group_normalized_advantages(rewards, rollout.group, False, episode=rollout.episode)
        return self.whiten(centred[:, None].expand(rollout.loss_mask.shape), rollout.loss_mask)
