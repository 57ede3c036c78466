"""Generative Adversarial Imitation Learning: arXiv 1606.03476; with the policy's loss of GRPO, arXiv 2402.03300."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid, pad

from rlflow import PerSample, PerToken, RewardModel, node
from rlflow.types import After, Each, NewRows, Ragged, RowPath, Tokens, TokensWithLossMask, WithLossMask

from .grpo import GRPO
from .policy_gradient import Clipped, GroupBaseline


class WithResponses(WithLossMask, Protocol):
    """The fields of the dataset's rows that the discriminator reads; their prompts are those of the samples."""

    response_ids: PerToken  # [B, T]
    path: RowPath | None


class SampledRows(TokensWithLossMask, Protocol):
    """The fields of samples that the discriminator reads."""

    pictures: Ragged


@dataclass(frozen=True)
class Labelled:
    """Rows that train the discriminator: the dataset's response to each prompt, then the samples of all these prompts.

    Of `B` prompts on this rank these are `N = B + B * group_size` rows, padded to the longest response of both kinds.

    Attributes:
        path: Paths of the prompts that the rows belong to.
        prompt_ids: Token ids of the prompts as the policy read them.
        response_ids: `[N, T]` token ids.
        loss_mask: `[N, T]`, True on tokens that count.
        lengths: `[N]`, response tokens.
        real: `[N]` bool, True for the dataset's responses.
        weights: `[N]`, 1 for a sample, and for a dataset's response the number of its prompt's samples that count.
        pictures: `[sum]` int64, numbers of the pictures of each prompt.
    """

    path: RowPath
    prompt_ids: Ragged
    response_ids: PerToken
    loss_mask: PerToken
    lengths: PerSample
    real: PerSample
    weights: PerSample
    pictures: Ragged


@dataclass(eq=False)
class GAIL(GroupBaseline, Clipped):
    """Trains a discriminator to tell the dataset's responses from samples, and the policy to pass for the dataset.

        D(x, y) = sigmoid(s(x, y))                                  s: the discriminator's score of the response y to x
        discriminator: ascends E_data[log D] + E_pi[log(1 - D)]     (the paper's D is 1 minus this one)
        policy:        GRPO's loss with the reward r(x, y) = -log(1 - D(x, y))

    A sample with a score of 0 has D = 0.5 and the reward 0.69; the reward grows with the score. In each step the
    discriminator is trained first, and then scores the samples. The dataset's response counts as much in the
    discriminator's loss as all samples of its prompt that count. The dataset's rows need a response; no verifier is
    needed.

    Args:
        normalize_std: Divide advantages by the standard deviation of the group's rewards.
        discriminator: The model that is trained to distinguish the two; a reward model, or a language model that gets a
            head.
    """

    normalize_std: bool = True
    discriminator: RewardModel | str = field(kw_only=True)

    kl_penalty = None

    advantages = GRPO.advantages

    @node
    def examples(self, batch: WithResponses, rollout: Each[SampledRows]) -> NewRows[Labelled]:
        sampled, parent = rollout.values, rollout.parent
        real = torch.arange(len(batch.lengths), device=parent.device)
        first = rollout.counts.cumsum(0) - rollout.counts  # of each prompt's samples: an environment may add to prompts
        seen = torch.cat([first, torch.arange(len(parent), device=parent.device)])
        counts = sampled.loss_mask.any(dim=1).float()
        weights = counts.new_zeros(len(real)).index_add(0, parent, counts)
        return Labelled(
            batch.path.take(torch.cat([real, parent])),
            sampled.prompt_ids.take(seen),
            below(batch.response_ids, sampled.response_ids),
            below(batch.loss_mask, sampled.loss_mask),
            torch.cat([batch.lengths, sampled.lengths]),
            torch.arange(len(seen), device=seen.device) < len(real),
            torch.cat([weights, torch.ones_like(counts)]),
            sampled.pictures.take(seen),
        )

    @node(role="discriminator", type="train")
    def discriminator_loss(self, examples: Labelled) -> PerSample:
        scores, real = self.discriminator.scores(examples), examples.real
        self.log("discriminator/accuracy", ((scores > 0) == real).float())
        self.log("discriminator/real", torch.sigmoid(scores.detach()[real]))
        self.log("discriminator/sampled", torch.sigmoid(scores.detach()[~real]))
        return examples.weights * binary_cross_entropy_with_logits(scores, real.to(scores.dtype), reduction="none")

    @node(role="discriminator")
    def rewards(self, rollout: Tokens, discriminator_loss: After) -> PerSample:
        rewards = -logsigmoid(-self.discriminator.scores(rollout))
        self.log("reward/discriminator", rewards)
        return rewards


def below(upper: Tensor, lower: Tensor) -> Tensor:
    """The rows of `upper`, then those of `lower`, padded to the wider: `[2B, T]`."""
    width = max(upper.shape[1], lower.shape[1])
    return torch.cat([pad(x, (0, width - x.shape[1])) for x in (upper, lower)])
