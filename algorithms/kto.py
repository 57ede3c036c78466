"""Kahneman-Tversky Optimization, from responses that are each good or bad: arXiv 2402.01306."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from rlflow import Batch, CausalLM, PerSample, PerToken, RLModule, UserError, node
from rlflow.functional import kto_loss
from rlflow.types import Ragged, Scalar, WithDatasetRows


class RowsWithLabels(WithDatasetRows, Protocol):
    """The fields of the dataset's rows that say which responses are good."""

    @property
    def lengths(self) -> PerSample:
        """`[B]`, tokens of each response."""


@dataclass(eq=False)
class KTO(RLModule):
    """Kahneman-Tversky Optimization: trains on given responses, each labelled good or bad.

    lambda_D (1 - sigmoid(beta (r - z))) for a good response, lambda_U (1 - sigmoid(beta (z - r))) for a bad one.

    Equations 7 and 8, one loss for each response of the dataset: r = log pi(y|x) - log ref(y|x), summed over tokens,
    and z the policy's divergence from the reference. As the authors do, z is the mean of r over all rows of the step,
    each prompt with the response of the next row, and at least 0; it is that of the policy before the step. Validation
    logs `margin`, the mean of beta r over good responses minus that over bad ones, of batches that have both.

    Args:
        actor: The model to train.
        beta: Factor on log ratios, above 0; gains and losses saturate sooner if it is larger.
        reference: The frozen model in the denominator of log ratios; None for the actor's initial weights.
        desirable_weight: lambda_D. If the numbers of good and bad rows, n_D and n_U, differ, the paper takes lambda_D
            n_D from 1 to 1.5 times lambda_U n_U (equation 9).
        undesirable_weight: lambda_U.
        label: Column that is true if the response is good.
    """

    actor: CausalLM | str
    beta: float = 0.1
    reference: CausalLM | str | None = None
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    label: str = "label"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta > 0:
            raise UserError(f"`beta` is {self.beta}; give more than 0, or good and bad responses count alike")

    def configure_models(self) -> None:
        if self.reference is None:
            self.reference = self.actor.initial()
        else:
            self.reference.only_scores(like=self.actor)  # type: ignore[arg-type]

    @node
    def labels(self, batch: RowsWithLabels) -> PerSample:
        values = [row.get(self.label) for row in batch.rows]
        if wrong := [value for value in values if value not in (True, False)]:
            raise UserError(f"`label` is {self.label!r}, and a row has {wrong[0]!r:.60} there; write true or false")
        return torch.tensor(values, dtype=torch.float32, device=batch.lengths.device)

    @node(role="reference")
    def ref_logprobs(self, batch: Batch) -> PerSample:
        return whole(self.reference.logprobs(batch), batch)

    @node(role="reference")
    def ref_swapped(self, batch: Batch) -> PerSample:
        swapped = self.swapped(batch)
        return whole(self.reference.logprobs(swapped), swapped)

    @node(role="actor")
    def divergence(self, batch: Batch, ref_swapped: PerSample) -> Scalar:
        swapped = self.swapped(batch)
        return self.mean(whole(self.actor.logprobs(swapped), swapped) - ref_swapped).clamp(min=0.0)

    @node(role="actor", type="train")
    def actor_loss(self, batch: Batch, labels: PerSample, ref_logprobs: PerSample, divergence: Scalar) -> PerSample:
        ratios = whole(self.actor.logprobs(batch), batch) - ref_logprobs
        good = labels.bool()
        self.log("actor/good_reward", self.beta * ratios.detach(), good)
        self.log("actor/bad_reward", self.beta * ratios.detach(), ~good)
        return kto_loss(ratios, divergence, good, self.beta, self.desirable_weight, self.undesirable_weight)

    def validation_step(self, batch: Batch) -> None:
        ratios = whole(self.actor.logprobs(batch), batch) - whole(self.reference.logprobs(batch), batch)
        good = self.labels(batch).bool()
        if 0 < self.mean(good.float()) < 1:
            self.log("val/margin", self.beta * (self.mean(ratios, good) - self.mean(ratios, ~good)), batch_size=1)

    def swapped(self, batch: Batch) -> Batch:
        """Each row's prompt with the response of the step's next row; the last row gets the first response."""
        index = self.all_rows(batch.index)  # [N], ascending
        if len(index) < 2:
            raise UserError("a step has 1 row, and KTO takes z from other rows' responses; raise `prompts_per_step`")
        following = (torch.searchsorted(index, batch.index) + 1) % len(index)
        within = torch.arange(batch.response_ids.shape[1], device=batch.lengths.device) < batch.lengths[:, None]
        ids, mask = (
            self.all_rows(Ragged(of_rows[within], batch.lengths)).take(following)
            for of_rows in (batch.response_ids, batch.loss_mask)
        )
        return replace(batch, response_ids=ids.padded(), lengths=ids.lengths, loss_mask=mask.padded())


def whole(logprobs: PerToken, batch: Batch) -> PerSample:
    """The logprob of each response, or of the assistant's turns in a conversation."""
    return (logprobs * batch.loss_mask).sum(dim=1)
