"""Group Policy Gradient: GPG, arXiv 2504.02546."""

from dataclasses import dataclass
from typing import ClassVar

from rlflow import Grouped, PerSample, PerToken, node
from rlflow.functional import beside_tokens, group_has_signal, group_normalized_advantages

from .policy_gradient import PolicyGradient


@dataclass(eq=False)
class GPG(PolicyGradient):
    """A_i = alpha (r_i - mean_g) and loss -A log pi; alpha makes up for groups whose equal rewards teach nothing.

    Without a ratio the gradient is right for the policy that sampled alone, so there is one update a step.

    Args:
        group_size: Responses to each prompt, at least 2.
    """

    group_size: int = 8

    compares_group: ClassVar[bool] = True
    one_update: ClassVar[bool] = True
    unused: ClassVar[tuple[str, ...]] = ("advantages_at", "anchor", "clip")

    @node
    def advantages(self, rollout: Grouped, rewards: PerSample) -> PerSample:
        has_signal = group_has_signal(rewards, rollout.group)
        self.log("actor/useful_share", has_signal)
        useful = self.mean(has_signal)
        alpha = 1 / useful.clamp(min=1e-12)  # where no group is useful, all advantages are 0
        centred = group_normalized_advantages(rewards, rollout.group, False)
        return centred * alpha.to(rewards.dtype)

    def surrogate(self, logprobs: PerToken, old_logprobs: PerToken, advantages: PerSample, mask: PerToken) -> PerToken:
        return -beside_tokens(advantages, logprobs) * logprobs
