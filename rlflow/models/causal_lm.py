"""`CausalLM`, the language model that an algorithm speaks of, and its scores of rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from rlflow.data.batch import PerToken
from rlflow.errors import UserError
from rlflow.models.handle import ModelHandle
from rlflow.models.lora import LoRA, adapters_off
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
        lora: Train adapters of these settings instead of all weights.
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
        lora: LoRA | None = None,
    ) -> None:
        if not temperature > 0:
            raise UserError(f"`temperature` is {temperature}; it divides the logits, so give more than 0")
        super().__init__(
            model, trainable, optimizer, epochs, samples_per_update, start_step, gradient_checkpointing, lora
        )
        self.temperature = temperature
        self.watch: Callable[[Responses, Tensor], None] = _ignore  # told of all logprobs, with their rows

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

    def without_adapters(self) -> WithoutAdapters:
        """A frozen view of this model as it was before training: no second copy, the adapters are left out.

        Raises:
            UserError: It has none.
        """
        if self.lora is None:
            raise UserError(f"{self.model!r} has no adapters to leave out; set `lora`, or load the model once more")
        return WithoutAdapters(self)

    def _read(self, path: Path, dtype: torch.dtype, device: torch.device, empty: bool) -> ScoringModel:
        return ScoringModel.load(path, dtype, device, self.gradient_checkpointing, empty)


class WithoutAdapters(CausalLM):
    """A language model with its adapters off, on its owner's engine; `CausalLM.without_adapters` makes it.

    Args:
        owner: The trained model.
    """

    def __init__(self, owner: CausalLM) -> None:
        super().__init__(owner.model, trainable=False, temperature=owner.temperature)
        self.owner = owner

    def attach_to_owner(self) -> None:
        """Score with what the owner scores with from now on."""
        assert self.owner._forward is not None, "the owner is set up first"
        self.attach(self.owner._forward, self.owner.plan)

    def _score_once(self, rows: Responses, *arguments: object) -> tuple[Tensor, ...]:
        assert self._forward is not None, "attach comes first"
        with adapters_off(self._forward):
            return super()._score_once(rows, *arguments)


def _ignore(rows: Responses, logprobs: Tensor) -> None:
    """Nobody watches."""
