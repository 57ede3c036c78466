"""One update of GRPO, arXiv 2402.03300, with clip-higher, dual clip, importance correction and KL in the loss."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tests.reference.update import DEFAULT_STEP, Step, Update, load_float64, mean_loss, one_update, response_logprobs


@dataclass(frozen=True)
class Sample:
    """One sampled response.

    Attributes:
        prompt_ids: Token ids, at least one.
        response_ids: Token ids, the end-of-sequence token included.
        reward: Of the response.
        group: Which prompt it answers.
        loss_mask: Which tokens of the response count; None is all.
        rollout_logprobs: The engine's; None leaves the importance weights out.
        old_logprobs: The policy's at the start of the step; None for those of the policy that is being updated.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    reward: float
    group: int
    loss_mask: Sequence[bool] | None = None
    rollout_logprobs: Sequence[float] | None = None
    old_logprobs: Sequence[float] | None = None

    @property
    def mask(self) -> list[bool]:
        return [True] * len(self.response_ids) if self.loss_mask is None else [bool(m) for m in self.loss_mask]


@dataclass(frozen=True)
class Objective:
    """Settings of the loss, named as in the algorithm.

    Attributes:
        normalize_std: Divide advantages by the group's unbiased standard deviation plus `eps`.
        eps: Added to that deviation.
        clip_low: Lower clip range of the ratio.
        clip_high: Upper clip range of the ratio.
        dual_clip: Bound of the ratio where the advantage is negative; None is off.
        kl_coef: Weight of the divergence from the reference.
        kl_kind: `k1`, `k2` or `k3`.
        importance_high: Where importance weights of tokens are truncated.
        loss_aggregation: As in `mean_loss`.
        max_response_length: The divisor of the `constant` aggregation.
        temperature: Of sampling.
    """

    normalize_std: bool = True
    eps: float = 1e-6
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl_kind: str = "k3"
    importance_high: float = 2.0
    loss_aggregation: str = "token-mean"
    max_response_length: int | None = None
    temperature: float = 1.0


def grpo_update(
    folder: str | Path,
    samples: Sequence[Sample],
    objective: Objective = Objective(),
    step: Step = DEFAULT_STEP,
    reference_folder: str | Path | None = None,
) -> Update:
    """The loss of all samples as one batch, its gradient, and the weights after one step.

    Args:
        folder: The policy, in Hugging Face form.
        samples: The batch; samples of a group may stand anywhere.
        objective: Settings of the loss.
        step: Settings of the optimizer.
        reference_folder: The reference policy, needed where `kl_coef` is not 0.
    """
    policy = load_float64(folder)
    reference = None if objective.kl_coef == 0 else load_float64(reference_folder or folder)
    advantages = group_advantages(samples, objective)
    losses = []
    for sample, advantage in zip(samples, advantages, strict=True):
        logprobs = response_logprobs(policy, sample.prompt_ids, sample.response_ids, objective.temperature)
        loss = _policy_loss(logprobs, sample, advantage, objective)
        if reference is not None:
            with torch.no_grad():
                ref = response_logprobs(reference, sample.prompt_ids, sample.response_ids, objective.temperature)
            loss = loss + objective.kl_coef * _divergence(logprobs, ref, objective.kl_kind)
        losses.append(loss)
    masks = [sample.mask for sample in samples]
    loss = mean_loss(losses, masks, objective.loss_aggregation, objective.max_response_length)
    return one_update(policy, loss, step)


def group_advantages(samples: Sequence[Sample], objective: Objective) -> list[float]:
    """`(r - mean) / (std + eps)` of each sample within its group, in exact rational arithmetic until the division."""
    advantages = []
    for sample in samples:
        rewards = [other.reward for other in samples if other.group == sample.group]
        advantage = sample.reward - statistics.mean(rewards)
        if objective.normalize_std:
            advantage /= statistics.stdev(rewards) + objective.eps
        advantages.append(advantage)
    return advantages


def _policy_loss(logprobs: Tensor, sample: Sample, advantage: float, objective: Objective) -> Tensor:
    old = logprobs.detach()
    if sample.old_logprobs is not None:
        old = torch.tensor(sample.old_logprobs, dtype=torch.float64)
    ratio = torch.exp(logprobs - old)
    inside = torch.clip(ratio, 1 - objective.clip_low, 1 + objective.clip_high)
    loss = torch.max(-advantage * ratio, -advantage * inside)
    if objective.dual_clip is not None and advantage < 0:
        loss = torch.clip(loss, max=-advantage * objective.dual_clip)
    if sample.rollout_logprobs is None:
        return loss
    gaps = [o - r for o, r in zip(old.tolist(), sample.rollout_logprobs, strict=True)]
    return loss * torch.tensor([min(math.exp(gap), objective.importance_high) for gap in gaps], dtype=torch.float64)


def _divergence(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    if kind == "k1":
        return logprobs - ref_logprobs
    if kind == "k2":
        return 0.5 * (logprobs - ref_logprobs) ** 2
    if kind == "k3":
        return torch.exp(ref_logprobs - logprobs) - (ref_logprobs - logprobs) - 1
    raise ValueError(kind)
