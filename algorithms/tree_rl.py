"""Responses that branch where the policy is least sure, with advantages by subtree: TreeRL, arXiv 2506.11902."""

from dataclasses import dataclass, field

import torch
from torch.nn.functional import pad

from rlflow import Batch, PerSample, PerToken, Rollout, UserError, node
from rlflow.types import Each, Grouped, Sampled, WithLossMask

from .policy_gradient import Clipped, GroupBaseline, Scored


@dataclass(eq=False)
class TreeRL(GroupBaseline, Clipped, Scored):
    """Tree-search reinforcement learning: trains on sampled responses that share their beginnings, as in a tree.

    A(s) = [V(s) - V(root)] + [V(s) - V(parent of s)]; V of a leaf is its reward, else the mean V of its children.

    The root is a prompt, its children are trunks, and each trunk forks once into `branches` leaves. Tokens before the
    fork have their trunk's advantage, tokens after it their leaf's. Two trunks with the rewards 1, 0 and 0, 0:

        V   root 0.25    trunks 0.5, 0       leaves 1, 0, 0, 0
        A                trunks 0.5, -0.5    leaves 1.25, -0.75, -0.25, -0.25

    A trunk that ends before it forks has two leaves, both its copies, and counts at the root as much as any other.
    TreeRL weighs a step by 1 / sqrt(its leaves), since it trains the step once in each of them; here a token that
    leaves share is trained once, and needs no weight.

    Args:
        branches: Number of leaves of each trunk, so a prompt has `group_size / branches` trunks. The trunk itself,
            generated to its end, is one of the leaves.
        trunk_tokens: Tokens after which a trunk forks. None to fork before the token that was least likely when it was
            sampled, TreeRL's measure of the policy's uncertainty.
    """

    branches: int = 2
    trunk_tokens: int | None = None
    environment: None = field(default=None, init=False)  # none can continue from where a trunk forks

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.branches < 2:
            raise UserError(f"`branches` is {self.branches}; a trunk that forks has at least 2 leaves. Raise it")
        if self.group_size % self.branches:
            raise UserError(
                f"`group_size` is {self.group_size} and `branches` is {self.branches}; each trunk has as many leaves,"
                " so make `group_size` a multiple"
            )

    @node(generates="actor")
    def trunk(self, batch: Batch) -> Rollout:
        rollout: Rollout = self.actor.generate(
            batch, n=self.group_size // self.branches, max_new_tokens=self.trunk_tokens
        )
        return rollout

    @node
    def fork(self, trunk: Sampled) -> PerSample:
        if self.trunk_tokens is not None:
            return trunk.lengths
        places = torch.arange(trunk.logprobs.shape[1], device=trunk.lengths.device)
        logprobs = trunk.logprobs.masked_fill(places >= trunk.lengths[:, None], torch.inf)
        return pad(logprobs, (0, 1), value=torch.inf).argmin(dim=1)

    @node(generates="actor")
    def rollout(self, trunk: Rollout, fork: PerSample) -> Rollout:
        whole: Rollout = self.actor.generate(trunk)
        return whole.concat(self.actor.generate(trunk.cut(fork), n=self.branches - 1))

    @node
    def value(self, trunk: Grouped, rewards: Each[PerSample]) -> PerSample:
        return rewards.mean()

    @node
    def root_value(self, batch: Grouped, value: Each[PerSample]) -> PerSample:
        return value.mean()

    @node
    def advantages(
        self, rollout: WithLossMask, fork: PerSample, rewards: PerSample, value: PerSample, root_value: PerSample
    ) -> PerToken:
        places = torch.arange(rollout.loss_mask.shape[1], device=rewards.device)
        shared = places < fork[:, None]  # [B, T]
        return torch.where(shared, 2 * (value - root_value)[:, None], (2 * rewards - root_value - value)[:, None])
