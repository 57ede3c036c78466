"""Group Policy Gradient: GPG, arXiv 2504.02546."""

from dataclasses import dataclass

from rlflow import PerSample, node
from rlflow.functional import group_has_signal, group_normalized_advantages
from rlflow.types import Grouped

from .policy_gradient import GroupBaseline, PolicyGradient, Scored


@dataclass(eq=False)
class GPG(GroupBaseline, PolicyGradient, Scored):
    """The plain policy gradient with the group's mean as baseline, scaled up where groups have equal rewards.

        A_i = alpha (r_i - mean_g),    alpha = samples / samples of groups whose rewards differ, over all ranks
        surrogate_t = -A_i log pi_t

    Where all rewards of a group are equal, it has no gradient; if that holds for three quarters of the groups, alpha
    is 4. Without a ratio the gradient is right only for the policy that sampled, so a step makes one update:
    `actor.samples_per_update` and `actor.epochs` above 1 are refused.
    """

    @node
    def advantages(self, rollout: Grouped, rewards: PerSample) -> PerSample:
        has_signal = group_has_signal(rewards, rollout.group)
        self.log("actor/useful_share", has_signal, rollout.first)
        useful = self.mean(has_signal, rollout.first)
        alpha = 1 / useful.clamp(min=1e-12)  # where no group is useful, all advantages are 0
        centred = group_normalized_advantages(rewards, rollout.group, False, episode=rollout.episode)
        return centred * alpha.to(rewards.dtype)
