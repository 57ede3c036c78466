"""Functions that the configs of these tests name, as a user's file would have them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlflow import CausalLM, PerSample, PerToken, RLModule, Rollout, node
from rlflow.types import Scalar


def shortened(rollout: Rollout, rewards: PerSample, weight: float = 0.1, floor: float | None = None) -> PerSample:
    shorter = rewards - weight * rollout.lengths
    return shorter if floor is None else shorter.clamp(min=floor)


def centred(self: RLModule, rewards: PerSample) -> PerSample:
    centred: PerSample = rewards - self.mean(rewards)
    self.log("reward/centred", centred)
    return centred


@node(role="actor", type="train")
def likelihood_loss(self: Any, rollout: Rollout, advantages: PerSample) -> PerToken:
    actor: CausalLM = self.actor
    return -advantages[:, None] * actor.logprobs(rollout)


def squared(x: PerSample) -> PerSample:
    return x * x


def longest(lengths: Tensor) -> Scalar:
    return lengths.max()


def unsaid(rewards: Any):
    return rewards


def preferred(self: Any, chosen: Any, beta: float) -> PerSample:
    return -beta * self.actor.logprobs(chosen).sum(dim=1)


def starred(*values: Tensor) -> PerSample:
    return values[0]


constant = 3
