"""Group reward-Decoupled Normalization Policy Optimization: GDPO, arXiv 2601.05242."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from rlflow import PerSample, UserError, node
from rlflow.functional import group_has_signal, group_normalized_advantages
from rlflow.types import Grouped, WithTexts

from .policy_gradient import Clipped, GroupBaseline


@dataclass(eq=False)
class GDPO(GroupBaseline, Clipped):
    """GRPO that normalizes each part of the reward in the group by itself, then whitens the weighted sum.

        A_in = (r_in - mean_g r_n) / (std_g r_n + 1e-6)       part n of the reward of response i
        S_i  = sum_n w_n A_in
        A_i  = (S_i - mean) / std                             over all responses of the step, on all ranks

    So a part with a small range counts as much as one with a large range. The reward is a `WeightedSum`, or a function
    that returns a dict of names to numbers. `part_weights: {right: 1, brevity: 0.5}` chooses two parts; it is in
    place of the weights of the sum.

    Args:
        part_weights: The parts that count, by name, and their weights w; None for all parts, each with weight 1.
    """

    part_weights: Mapping[str, float] | None = None
    environment: None = field(default=None, init=False)  # what it gives is not a part of the reward

    kl_penalty = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward is None:
            raise UserError("`reward` is not set, and GDPO learns from its parts; name one, such as a WeightedSum")

    @node
    def parts(self, rollout: WithTexts) -> dict[str, PerSample]:
        return self.reward_parts(rollout)

    @node
    def advantages(self, rollout: Grouped, parts: dict[str, PerSample]) -> PerSample:
        weights = self.part_weights or dict.fromkeys(parts, 1.0)
        useful = torch.stack([group_has_signal(parts[name], rollout.group) for name in weights])
        self.log("actor/useful_share", useful.any(dim=0))
        each = [w * group_normalized_advantages(parts[name], rollout.group) for name, w in weights.items()]
        return self.whiten(torch.stack(each).sum(dim=0))
