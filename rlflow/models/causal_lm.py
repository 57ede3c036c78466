"""`CausalLM`, the language model that an algorithm speaks of, and its scores of rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from rlflow.data.batch import PerToken
from rlflow.errors import UserError
from rlflow.models.handle import ModelHandle
from rlflow.models.optimizer import Optimizer
from rlflow.models.packing import Responses, no_rows
from rlflow.models.scoring import ScoringModel


class CausalLM(ModelHandle):
    """A language model of an algorithm: `self.actor = CausalLM(self.model)`. Constructing it loads nothing.

    Every method that scores is a collective of the role's ranks: all of them call it, ranks without rows included.

    Args:
        model: A folder in Hugging Face form, a Hugging Face name, or `tiny`.
        trainable: Whether it is trained; a frozen model has no optimizer and no gradients.
        optimizer: How it is trained; `Optimizer()` where a trainable model is given none.
        temperature: Divides the logits; that of the rollout.
        epochs: How often each step goes over its rows.
        samples_per_update: Rows of one optimizer update over all ranks; all rows of the step where None.
        start_step: The first step that trains it, counted from 0; before, its train nodes are left out.
        gradient_checkpointing: Trade time for memory in the backward pass.
    """

    def __init__(
        self,
        model: str,
        trainable: bool = True,
        optimizer: Optimizer | None = None,
        temperature: float = 1.0,
        epochs: int = 1,
        samples_per_update: int | None = None,
        start_step: int = 0,
        gradient_checkpointing: bool = False,
    ) -> None:
        if not temperature > 0:
            raise UserError(f"`temperature` is {temperature}; it divides the logits, so give more than 0")
        super().__init__(model, trainable, optimizer, epochs, samples_per_update, start_step, gradient_checkpointing)
        self.temperature = temperature
        self.watch: Callable[[Responses, Tensor], None] = _ignore  # told of all logprobs, with their rows

    def load(self, path: Path, dtype: torch.dtype, device: torch.device) -> ScoringModel:
        """Read the weights; see `ModelHandle.load`."""
        model = ScoringModel.load(path, dtype, device, self.gradient_checkpointing)
        return model.requires_grad_(self.trainable)

    def score(self, rows: Responses) -> tuple[PerToken, PerToken]:
        """Log-probability of each response token, and entropy of the distribution that it was drawn from.

        Args:
            rows: A `Batch`, a `Rollout`, or anything with their `prompt_ids`, `response_ids` and `lengths`.

        Returns:
            `[B, T]` each, in float32 (float64 where the model is), 0 where padded.
        """
        logprobs, entropy = self._scores(rows, self.temperature)
        self.watch(rows, logprobs)
        return logprobs, entropy

    def logprobs(self, rows: Responses) -> PerToken:
        """The first of `score`."""
        return self.score(rows)[0]

    def entropy(self, rows: Responses) -> PerToken:
        """The second of `score`."""
        return self.score(rows)[1]

    def score_nothing(self) -> Tensor:
        """See `ModelHandle.score_nothing`."""
        return self._scores(no_rows(), self.temperature)[0].sum()


def _ignore(rows: Responses, logprobs: Tensor) -> None:
    """Nobody watches."""
