"""GRPO with one fault each, as people write them; and right algorithms that are unusual."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlflow import PerSample, PerToken, Rollout, node
from rlflow.algorithms import GRPO
from rlflow.functional import group_normalized_advantages
from rlflow.types import Grouped, Sampled, WithLossMask, WithTexts


class MeanOverMicroBatch(GRPO):
    """The loss is divided by the tokens of the rows that are there, which are a micro-batch."""

    @node(role="actor", type="train")
    def actor_loss(self, rollout: Sampled, advantages: PerSample) -> PerToken:
        loss = -advantages[:, None] * self.actor.logprobs(rollout)
        return loss / rollout.loss_mask.sum().clamp(min=1)


class PaddingCounts(GRPO):
    """The mean over a row goes over its padding too."""

    @node(role="actor", type="train")
    def actor_loss(self, rollout: Sampled, advantages: PerSample) -> PerSample:
        return (-advantages[:, None] * self.actor.logprobs(rollout)).mean(dim=1)


class GroupCutInTwo(GRPO):
    """Advantages are made in the loss, which sees the part of a group that a micro-batch has."""

    advantages = None

    @node(role="actor", type="train")
    def actor_loss(self, rollout: Rollout, rewards: PerSample) -> PerToken:
        return -group_normalized_advantages(rewards, rollout.group)[:, None] * self.actor.logprobs(rollout)


class Detached(GRPO):
    """The log-probabilities are detached."""

    def surrogate(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        return super().surrogate(logprobs.detach(), old_logprobs, advantages, mask)


class NotDetached(GRPO):
    """The old log-probabilities are the new ones with their gradient, so the ratio is 1 whatever the weights."""

    @node(role="actor", type="train")
    def actor_loss(self, rollout: Sampled, advantages: PerSample) -> PerToken:
        logprobs = self.actor.logprobs(rollout)
        return -advantages[:, None] * torch.exp(logprobs - logprobs)


class RandomWithoutSeed(GRPO):
    """Advantages are jittered by the process's generator."""

    @node
    def advantages(self, rollout: Grouped, rewards: PerSample) -> PerSample:
        return group_normalized_advantages(rewards, rollout.group) + 0.01 * torch.randn_like(rewards)


class RewardReadWhereItMoved(GRPO):
    """Rewards are kept aside, and read in the loss as if its rows were the same."""

    @node
    def rewards(self, rollout: WithTexts) -> PerSample:
        self.kept = super().rewards(rollout)
        return self.kept

    @node(role="actor", type="train")
    def actor_loss(self, rollout: Sampled, advantages: PerSample) -> PerToken:
        centred = self.kept[: len(advantages)] - 0.5
        return -centred[:, None] * self.actor.logprobs(rollout)


@dataclass(eq=False)
class WholeSequence(GRPO):
    """A ratio of whole responses to the engine's, over the tokens of `counted`."""

    importance: None = None
    anchor: str = "rollout"

    @node(role="actor", type="train")
    def actor_loss(self, rollout: Sampled, advantages: PerSample) -> PerSample:
        apart = (self.actor.logprobs(rollout) - rollout.logprobs) * self.counted(rollout)
        return -advantages * torch.exp(apart.sum(dim=1) / 20)

    def counted(self, rollout: Any) -> Tensor:
        return rollout.loss_mask.float()


class MaskOneOff(WholeSequence):
    def counted(self, rollout: Any) -> Tensor:
        return torch.nn.functional.pad(rollout.loss_mask, (1, 0))[:, :-1].float()


class LengthsWithPrompt(WholeSequence):
    def counted(self, rollout: Any) -> Tensor:
        lengths = rollout.prompt_ids.lengths + rollout.lengths
        return (torch.arange(rollout.loss_mask.shape[1]) < lengths[:, None]) * 1.0


class MaskedLeaks(WholeSequence):
    def counted(self, rollout: Any) -> Tensor:
        return (torch.arange(rollout.loss_mask.shape[1]) < rollout.lengths[:, None]) * 1.0


class MeanOverLocalRows(GRPO):
    """The baseline is the mean reward of the rows on this rank."""

    @node
    def advantages(self, rollout: Grouped, rewards: PerSample) -> PerSample:
        return rewards - rewards.mean()


class AdvantagesOfAnotherRank(GRPO):
    """Every rank takes the first advantages of all."""

    @node
    def advantages(self, rollout: Grouped, rewards: PerSample) -> PerSample:
        return self.all_rows(group_normalized_advantages(rewards, rollout.group))[: len(rewards)]


class DenominatorOfOtherSet(GRPO):
    """Advantages are divided by the tokens of this rank, and not of all."""

    @node
    def advantages(self, rollout: WithLossMask, rewards: PerSample) -> PerSample:
        return 100 * (rewards - 0.5) / rollout.loss_mask.sum()


class PicturesOfTheNextRow(GRPO):
    """The loss is of rows whose pictures have moved by one."""

    @node(role="actor", type="train")
    def actor_loss(self, rollout: Rollout, advantages: PerSample) -> PerToken:
        moved = replace(rollout, pictures=replace(rollout.pictures, values=rollout.pictures.values.roll(1)))
        return -advantages[:, None] * self.actor.logprobs(moved)


class RowBefore(GRPO):
    """The baseline of a response is the reward of the one before it."""

    @node
    def advantages(self, rollout: Grouped, rewards: PerSample) -> PerSample:
        return rewards - rewards.roll(1)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class WrongBackward(GRPO):
    """An autograd function whose backward pass lacks a factor."""

    def surrogate(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        return _Doubled.apply(super().surrogate(logprobs, old_logprobs, advantages, mask))


class ChangesItsInput(GRPO):
    """Advantages are halved where they are, and again in the next epoch."""

    def surrogate(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        return super().surrogate(logprobs, old_logprobs, advantages.mul_(0.5), mask)


class Counts(GRPO):
    """The loss grows with the calls of the node."""

    calls = 0

    def surrogate(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        self.calls += 1
        return super().surrogate(logprobs, old_logprobs, advantages, mask) * (1 + 0.1 * self.calls)


# The column that finds each fault, and the node that it names.
PLANTS: dict[type[GRPO], tuple[str, str]] = {
    MeanOverMicroBatch: ("micro-batches", "actor_loss"),
    PaddingCounts: ("padding", "actor_loss"),
    GroupCutInTwo: ("micro-batches", "actor_loss"),
    Detached: ("derivative", "actor_loss"),
    NotDetached: ("derivative", "actor_loss"),
    RandomWithoutSeed: ("randomness", "advantages"),
    RewardReadWhereItMoved: ("micro-batches", "actor_loss"),
    MaskOneOff: ("masked", "actor_loss"),
    LengthsWithPrompt: ("padding", "actor_loss"),
    MaskedLeaks: ("masked", "actor_loss"),
    MeanOverLocalRows: ("ranks", "advantages"),
    AdvantagesOfAnotherRank: ("ranks", "advantages"),
    DenominatorOfOtherSet: ("ranks", "advantages"),
    RowBefore: ("order", "advantages"),
    WrongBackward: ("derivative", "actor_loss"),
    ChangesItsInput: ("derivative", "actor_loss"),
    Counts: ("micro-batches", "actor_loss"),
}


class MeansOrder(RowBefore):
    depends_on: ClassVar[tuple[str, ...]] = ("order", "order of groups", "ranks")


class Broken(GRPO):
    @node
    def advantages(self, rollout: Grouped, rewards: PerSample) -> PerSample:
        return rewards / (1 // 0)
