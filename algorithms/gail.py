"""Generative Adversarial Imitation Learning: arXiv 1606.03476; with the policy's loss of GRPO, arXiv 2402.03300."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid, pad

from rlflow import Batch, Each, PerSample, PerToken, RewardModel, node
from rlflow.types import Grown, Masked, Ragged, RowPath, Tokens, Trained

from .grpo import GRPO
from .policy_gradient import Clipped, GroupBaseline


class ResponseTokens(Masked, Protocol):
    """Of samples: what is beside the prompts that the dataset's responses answer too."""

    response_ids: PerToken  # [B, T]


@dataclass(frozen=True)
class Labelled:
    """Responses, of which some are the dataset's: `real`, `[B]` bool."""

    path: RowPath
    prompt_ids: Ragged
    response_ids: PerToken
    loss_mask: PerToken
    lengths: PerSample
    real: PerSample


@dataclass(eq=False)
class GAIL(GroupBaseline, Clipped):
    """The judge's D(x, y) = sigmoid(s) tells the dataset's responses from samples; a sample is worth -log(1 - D).

    The judge ascends E_data[log D] + E_pi[log(1 - D)] (the paper's D is 1 minus this one), and judges the samples
    after its updates of the step. The dataset's rows need a response.

    Args:
        normalize_std: Divide advantages by the deviation of the group's rewards.
        judge: Is trained along, from a reward model or a language model.
    """

    normalize_std: bool = True
    judge: RewardModel | str = field(kw_only=True)

    kl_penalty = None

    advantages = GRPO.advantages

    @node
    def examples(self, batch: Batch, rollout: Each[ResponseTokens]) -> Grown[Labelled]:
        prompts = len(batch.lengths)
        real = torch.arange(prompts, device=batch.lengths.device)
        rows = torch.cat([real, rollout.parent])  # the prompt of each example: the dataset's responses, then samples
        sampled = rollout.values
        return Labelled(
            batch.path.take(rows),
            batch.prompt_ids.take(rows),
            below(batch.response_ids, sampled.response_ids),
            below(batch.loss_mask, sampled.loss_mask),
            torch.cat([batch.lengths, sampled.lengths]),
            torch.arange(len(rows), device=rows.device) < prompts,
        )

    @node(role="judge", type="train")
    def judge_loss(self, examples: Labelled) -> PerSample:
        scores, real = self.judge.scores(examples), examples.real
        self.log("judge/accuracy", ((scores > 0) == real).float())
        self.log("judge/real", torch.sigmoid(scores.detach()[real]))
        self.log("judge/sampled", torch.sigmoid(scores.detach()[~real]))
        weights = torch.where(real, self.group_size, 1)  # the one response counts as much as the prompt's samples
        return weights * binary_cross_entropy_with_logits(scores, real.to(scores.dtype), reduction="none")

    @node(role="judge")
    def rewards(self, rollout: Tokens, judge_loss: Trained) -> PerSample:
        rewards = -logsigmoid(-self.judge.scores(rollout))
        self.log("reward/judge", rewards)
        return rewards


def below(upper: Tensor, lower: Tensor) -> Tensor:
    """The rows of both `[B, T]`, as wide as the wider."""
    width = max(upper.shape[1], lower.shape[1])
    return torch.cat([pad(x, (0, width - x.shape[1])) for x in (upper, lower)])
