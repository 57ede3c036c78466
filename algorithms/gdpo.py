"""Group reward-Decoupled Normalization Policy Optimization: GDPO, arXiv 2601.05242."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from rlflow import PerSample, UserError, node
from rlflow.functional import group_has_signal, group_normalized_advantages
from rlflow.types import Grouped, Written

from .policy_gradient import Clipped, GroupBaseline


@dataclass(eq=False)
class GDPO(GroupBaseline, Clipped):
    """A = whitened sum_n w_n (r_n - mean_g) / std_g: each part of the reward is compared in the group by itself.

    Args:
        part_weights: The parts that count, by name, and their weights; None for all parts, each with 1.
    """

    part_weights: Mapping[str, float] | None = None
    environment: None = field(default=None, init=False)  # what it gives is no part of the reward

    kl_penalty = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward is None:
            raise UserError("`reward` is not set, and GDPO learns from its parts; name one, such as a WeightedSum")

    @node
    def parts(self, rollout: Written) -> dict[str, PerSample]:
        return self.reward_parts(rollout)

    @node
    def advantages(self, rollout: Grouped, parts: dict[str, PerSample]) -> PerSample:
        weights = self.part_weights or dict.fromkeys(parts, 1.0)
        useful = torch.stack([group_has_signal(parts[name], rollout.group) for name in weights])
        self.log("actor/useful_share", useful.any(dim=0))
        each = [w * group_normalized_advantages(parts[name], rollout.group) for name, w in weights.items()]
        return self.whiten(torch.stack(each).sum(dim=0))
