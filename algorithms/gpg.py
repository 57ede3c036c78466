"""Group Policy Gradient: GPG, arXiv 2504.02546."""

from dataclasses import dataclass

from rlflow import PerSample, node
from rlflow.functional import group_has_signal, group_normalized_advantages
from rlflow.types import Grouped

from .policy_gradient import GroupBaseline, PolicyGradient, Scored


@dataclass(eq=False)
class GPG(GroupBaseline, PolicyGradient, Scored):
    """A_i = alpha (r_i - mean_g) and loss -A log pi; alpha makes up for groups whose equal rewards teach nothing.

    Without a ratio the gradient is right for the policy that sampled alone, so there is one update a step.
    """

    @node
    def advantages(self, rollout: Grouped, rewards: PerSample) -> PerSample:
        has_signal = group_has_signal(rewards, rollout.group)
        self.log("actor/useful_share", has_signal)
        useful = self.mean(has_signal)
        alpha = 1 / useful.clamp(min=1e-12)  # where no group is useful, all advantages are 0
        centred = group_normalized_advantages(rewards, rollout.group, False)
        return centred * alpha.to(rewards.dtype)
