"""Group Relative Policy Optimization: DeepSeekMath, arXiv 2402.03300."""

from dataclasses import dataclass

from rlflow import PerSample, node
from rlflow.functional import group_has_signal, group_normalized_advantages
from rlflow.types import Grouped

from .policy_gradient import Clipped, GroupBaseline, Ratio, TurnCredit


@dataclass(eq=False)
class GroupRelative(GroupBaseline, Ratio, TurnCredit):
    """Group-relative advantages, shared by GRPO and the algorithms that change its surrogate alone (GSPO, CISPO, SAPO).

        A_i = (r_i - mean_g) / (std_g + 1e-6)         g: the responses to one prompt; std_g with N - 1

    A subclass defines `surrogate`. Where all rewards of a group are equal, its advantages are exactly 0;
    `actor/useful_share` is the share of samples in the other groups.

    Args:
        normalize_std: Divide advantages by std_g, the standard deviation of the group's rewards.
    """

    normalize_std: bool = True

    @node
    def advantages(self, rollout: Grouped, rewards: PerSample) -> PerSample:
        self.log("actor/useful_share", group_has_signal(rewards, rollout.group), rollout.first)
        return group_normalized_advantages(rewards, rollout.group, self.normalize_std, episode=rollout.episode)


@dataclass(eq=False)
class GRPO(GroupRelative, Clipped):
    """A_i = (r_i - mean_g) / std_g over the group g of a prompt; PPO's clipped loss, KL to a frozen reference.

        loss_t = -w_t min(r_t A_i, clip(r_t, 1 - clip.low, 1 + clip.high) A_i) + kl.coef KL_t - entropy_coef H_t

    With r_t = pi_t / old_t of token t; w_t and KL_t are those of `rlflow.functional.policy_gradient`. Four responses to
    a prompt with the rewards 1, 0, 0, 0 have the mean 0.25 and the deviation 0.5, so the advantages 1.5 and three times
    -0.5.
    """
