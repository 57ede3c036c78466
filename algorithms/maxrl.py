"""Maximum Likelihood Reinforcement Learning: MaxRL, arXiv 2602.02710."""

from dataclasses import dataclass, field

import torch

from rlflow import PerSample, UserError, node
from rlflow.functional import Aggregation, group_has_signal, group_normalized_advantages
from rlflow.types import Grouped

from .policy_gradient import Clipped, GroupBaseline, Scored


@dataclass(eq=False)
class MaxRL(GroupBaseline, Clipped, Scored):
    """Maximum Likelihood Reinforcement Learning: trains on groups of sampled responses that are right or wrong.

    A_i = (r_i - mean_g) / mean_g of rewards 0 and 1: hard prompts weigh as in the gradient of log p(right | x).

    One right response among N has the advantage N - 1, each of the others -1; without a right response all have 0. With
    one update a step the gradient is that of equation 10. A reward below 0 is refused with a `UserError`.
    """

    loss_aggregation: Aggregation = "sequence-mean-token-sum"

    overlong_buffer: None = field(default=None, init=False)  # its penalty makes a wrong response's reward negative

    kl_penalty = None

    @node
    def advantages(self, rollout: Grouped, rewards: PerSample) -> PerSample:
        if (least := self.all_rows(rewards).min()) < 0:
            raise UserError(
                f"a reward is {least:g}, and MaxRL divides by a group's mean; give 0 or more, 1 for a right response"
            )
        self.log("actor/useful_share", group_has_signal(rewards, rollout.group), rollout.first)
        centred = group_normalized_advantages(rewards, rollout.group, False, episode=rollout.episode)
        mean = rewards - centred
        return torch.where(mean > 0, centred / mean, 0.0).to(rewards.dtype)
