"""`CausalLM`, the language model that an algorithm speaks of: what to load, how to train it, and its scores of rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rlflow.data.batch import PerToken
from rlflow.errors import UserError
from rlflow.models.packing import (
    ModelInput,
    Responses,
    pack,
    packed_micro_batches,
    pad,
    padded_micro_batches,
    take,
    token_counts,
)
from rlflow.models.scoring import ScoringModel


@dataclass(frozen=True)
class Optimizer:
    """How a model is trained.

    Attributes:
        name: `adamw`, `sgd`, or the path of a class, `torch.optim.Adam` say. ZeRO hands it flat pieces of the weights:
            one that looks at their shapes, such as Adafactor, is right at stage 0 and in `SingleProcess` only.
        lr: The highest learning rate, reached after the warm-up.
        betas: Of AdamW.
        eps: Of AdamW.
        weight_decay: Decoupled from the gradient in AdamW, added to it in SGD.
        warmup_steps: Updates over which the learning rate rises from 0.
        schedule: How the learning rate goes on after the warm-up, until the last update.
        gradient_clipping: Longest gradient over all parameters; 0 for no limit.
        arguments: More arguments of the class: `{momentum: 0.9}`. One given by path gets these and `lr`.
    """

    name: str = "adamw"
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    gradient_clipping: float = 1.0
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay", "warmup_steps", "gradient_clipping"):
            if not getattr(self, name) >= 0:
                raise UserError(f"`optimizer.{name}` is {getattr(self, name)}; give 0 or more")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"`optimizer.betas` is {self.betas}; give two numbers from 0 to below 1")
        if self.name not in ("adamw", "sgd"):
            for name in ("betas", "eps", "weight_decay"):
                if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                    raise UserError(
                        f"`optimizer.{name}` is {getattr(self, name)}, and `optimizer.name` is a class; give it in"
                        f" `optimizer.arguments` if {self.name} has it"
                    )
        if self.name != "adamw" or self.arguments:
            try:
                inspect.signature(self.kind).bind([], **self.keywords)
            except TypeError as error:
                raise UserError(f"`optimizer.arguments` is {self.arguments}; {self.name}: {error}. Mend it") from error

    @property
    def kind(self) -> type[torch.optim.Optimizer]:
        """The class that `name` names."""
        path = {"adamw": "torch.optim.AdamW", "sgd": "torch.optim.SGD"}.get(self.name, self.name)
        module, _, name = path.rpartition(".")
        try:
            found = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(
                f"`optimizer.name` is {self.name!r}, and there is no such class ({error}); give `adamw`, `sgd` or the"
                " path of one, such as `torch.optim.Adam`"
            ) from error
        if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
            raise UserError(f"`optimizer.name` is {self.name!r}, which is no torch.optim.Optimizer; name one")
        return found

    @property
    def keywords(self) -> dict[str, Any]:
        """What the class is called with beside the parameters."""
        given: dict[str, Any] = {"lr": self.lr}
        if self.name in ("adamw", "sgd"):
            given["weight_decay"] = self.weight_decay
        if self.name == "adamw":
            # fused: one pass over weights, gradients and moments, on the CPU too
            given |= {"betas": self.betas, "eps": self.eps, "fused": True}
        if twice := given.keys() & self.arguments.keys():
            name = min(twice)
            raise UserError(f"`optimizer.arguments` has `{name}`; that is a setting, so give `optimizer.{name}`")
        return given | self.arguments


@dataclass(frozen=True)
class ForwardPlan:
    """How rows become forward passes.

    Attributes:
        token_budget: Most tokens of a micro-batch; a longer row stands alone.
        packing: Feed rows without padding. Off, each micro-batch is right-padded.
        agree: The largest of the counts that the ranks of the role pass in, a collective; by default of one rank.
    """

    token_budget: int = 4096
    packing: bool = True
    agree: Callable[[int], int] = int

    def __post_init__(self) -> None:
        if self.token_budget < 1:
            raise UserError(f"`token_budget` is {self.token_budget}; give 1 or more, 4096 say")

    def micro_batches(self, rows: Responses) -> list[Tensor]:
        """Row numbers of each micro-batch, as many on every rank of the role; there may be empty ones."""
        return self.split(rows, at_least=self.agree(len(self.split(rows))))

    def split(self, rows: Responses, at_least: int = 1) -> list[Tensor]:
        """Row numbers of each micro-batch of this rank alone, at least so many; there may be empty ones."""
        cut = packed_micro_batches if self.packing else padded_micro_batches
        return cut(token_counts(rows), self.token_budget, at_least)

    def model_input(self, rows: Responses) -> ModelInput:
        """What one forward pass over all of `rows` reads."""
        return pack(rows) if self.packing else pad(rows)


class CausalLM:
    """A language model of an algorithm: `self.actor = CausalLM(self.model)`. Constructing it loads nothing.

    Every method that scores is a collective of the role's ranks: all of them call it, ranks without rows included.

    Args:
        model: A folder in Hugging Face form, a Hugging Face name, or `tiny`.
        trainable: Whether it is trained; a frozen model has no optimizer and no gradients.
        optimizer: How it is trained; `Optimizer()` where a trainable model is given none.
        temperature: Divides the logits; that of the rollout.
        epochs: How often each step goes over its rows.
        samples_per_update: Rows of one optimizer update over all ranks; all rows of the step where None.
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
        gradient_checkpointing: bool = False,
    ) -> None:
        if not temperature > 0:
            raise UserError(f"`temperature` is {temperature}; it divides the logits, so give more than 0")
        if epochs < 1:
            raise UserError(f"`epochs` is {epochs}; give 1 or more")
        if samples_per_update is not None and samples_per_update < 1:
            raise UserError(f"`samples_per_update` is {samples_per_update}; give 1 or more, or null for all rows")
        if optimizer is not None and not trainable:
            raise UserError(f"`optimizer` is given for {model!r}, which is frozen; set `trainable` or leave it out")
        self.model = model
        self.trainable = trainable
        self.optimizer = optimizer or (Optimizer() if trainable else None)
        self.temperature = temperature
        self.epochs = epochs
        self.samples_per_update = samples_per_update
        self.gradient_checkpointing = gradient_checkpointing
        self.plan = ForwardPlan()
        self.watch: Callable[[Responses, Tensor], None] = _ignore  # told of all logprobs, with their rows
        self.forwarded_tokens = 0
        self.useful_tokens = 0
        self._forward: nn.Module | None = None
        self._training = False

    def load(self, path: Path, dtype: torch.dtype, device: torch.device) -> ScoringModel:
        """Read the weights. A strategy calls it, makes the model trainable its own way, and attaches the result."""
        model = ScoringModel.load(path, dtype, device, self.gradient_checkpointing)
        return model.requires_grad_(self.trainable)

    def attach(self, forward: nn.Module, plan: ForwardPlan) -> None:
        """Score with `forward` from now on.

        Args:
            forward: The `ScoringModel`, or an engine around it that is called alike.
            plan: How rows become forward passes.
        """
        forward.eval()  # a DeepSpeed engine's returns nothing
        self._forward = forward
        self.plan = plan

    @contextmanager
    def training(self) -> Iterator[None]:
        """Within it, scores carry gradients, and the rows given are one micro-batch: one forward pass."""
        assert self.trainable, self.model
        assert self._forward is not None, "attach comes first"
        self._forward.train()
        self._training = True
        try:
            yield
        finally:
            self._training = False
            self._forward.eval()

    def score(self, rows: Responses) -> tuple[PerToken, PerToken]:
        """Log-probability of each response token, and entropy of the distribution that it was drawn from.

        Args:
            rows: A `Batch`, a `Rollout`, or anything with their `prompt_ids`, `response_ids` and `lengths`.

        Returns:
            `[B, T]` each, in float32 (float64 where the model is), 0 where padded.
        """
        logprobs, entropy = self._score_once(rows) if self._training else self._score_all(rows)
        self.watch(rows, logprobs)
        return logprobs, entropy

    def logprobs(self, rows: Responses) -> PerToken:
        """The first of `score`."""
        return self.score(rows)[0]

    def entropy(self, rows: Responses) -> PerToken:
        """The second of `score`."""
        return self.score(rows)[1]

    @torch.no_grad()
    def _score_all(self, rows: Responses) -> tuple[PerToken, PerToken]:
        """Forward passes over micro-batches, without gradients."""
        parts = self.plan.micro_batches(rows)
        scores = [self._score_once(take(rows, part)) for part in parts]
        order = torch.cat(parts).argsort().to(rows.response_ids.device)
        logprobs, entropy = (torch.cat(values)[order] for values in zip(*scores, strict=True))
        return logprobs, entropy

    def _score_once(self, rows: Responses) -> tuple[PerToken, PerToken]:
        """One forward pass."""
        assert self._forward is not None, "attach comes first"
        device = next(self._forward.parameters()).device
        read = self.plan.model_input(rows).to(device)
        logprobs, entropy = self._forward(*read.arguments(), self.temperature)
        self.forwarded_tokens += read.input_ids.numel()
        self.useful_tokens += read.useful_tokens
        home = rows.response_ids.device
        return read.unpack(logprobs).to(home), read.unpack(entropy).to(home)


def _ignore(rows: Responses, logprobs: Tensor) -> None:
    """Nobody watches."""
