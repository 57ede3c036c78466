"""`CausalLM`, the language model that an algorithm speaks of, and its scores of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.models.handle import ModelHandle
from rlflow.models.lora import LoRA, adapters_off
from rlflow.models.moe import MoE, Routed, Routing, load_balancing_loss, routers, watch_routers
from rlflow.models.optimizer import Optimizer
from rlflow.models.packed import PackedModel
from rlflow.models.packing import ModelInput, Responses, no_rows
from rlflow.models.scoring import ScoringModel
from rlflow.values.cuts import PerToken


class Generator(Protocol):
    """Samples responses with one model's weights."""

    def __call__(
        self, rows: Any, n: int, temperature: float, max_new_tokens: int | None, stop: tuple[int, ...]
    ) -> Any: ...


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
        moe: How routers and experts of a mixture of experts are trained; None for as all weights are.
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
        moe: MoE | None = None,
    ) -> None:
        if not temperature > 0:
            raise UserError(f"`temperature` is {temperature}; it divides the logits, so give more than 0")
        if moe is not None and not trainable:
            raise UserError(f"`moe` is given for {model!r}, which is frozen; set `trainable` or leave it out")
        super().__init__(
            model, trainable, optimizer, epochs, samples_per_update, start_step, gradient_checkpointing, lora
        )
        self.temperature = temperature
        self.moe = moe
        self._routed: list[tuple[Routing, ModelInput]] = []  # training forwards that nobody asked of
        self.watch: Callable[[Responses, Tensor], None] = _ignore  # told of all logprobs, with their rows
        self._generator: Generator | None = None

    def generate(
        self,
        rows: Any,
        n: int = 1,
        *,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
        stop: Sequence[int] = (),
    ) -> Any:
        """Sample `n` responses to each row with this model's weights, in a node that is marked `generates=` its name.

        The model is trained or frozen. A node may call it as often as it likes, on what it reads or on what it makes of
        that: a second call on the same rows gives other responses.

        Args:
            rows: Prompts, `B` rows: `batch`, or what `Rollout.as_prompts` makes of responses.
            n: Responses to each; consecutive rows.
            temperature: Instead of the model's own; 0 takes the likeliest token.
            max_new_tokens: The longest response, at most the module's `max_response_length`, which is the default.
            stop: Tokens that end a response beside those that always do.

        Returns:
            A `Rollout` of `B * n` rows, whose parents are `rows`.

        Raises:
            UserError: No run is under way, the node does not name this model, or `rows` have no place in the step.
        """
        if self._generator is None:
            raise UserError(
                f"{self.model!r} generates in nodes that `Trainer.fit` runs; there is no step under way here"
            )
        chosen = self.temperature if temperature is None else temperature
        return self._generator(rows, n, chosen, max_new_tokens, tuple(stop))

    def attach_generator(self, generator: Generator) -> None:
        """Called before the first step; `generator` is what the module generates with this model."""
        self._generator = generator

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

    @property
    def replays_routing(self) -> bool:
        """See `ModelHandle.replays_routing`."""
        return self.trainable and self.moe is not None and self.moe.routing_replay

    @contextmanager
    def training(self) -> Iterator[None]:
        """See `ModelHandle.training`."""
        self._routed.clear()
        with super().training():
            yield

    def take_routed(self) -> Routed:
        """See `ModelHandle.take_routed`."""
        if self.moe is None or not self._routed:
            return Routed()
        seen, self._routed = self._routed, []
        loss = None
        if self.moe.router_aux_loss_coef > 0:
            of_passes = [
                load_balancing_loss(routing.logits, routing.used, read.sequence_lengths()).sum()
                * (read.useful_tokens > 0)  # not of the token that stands for no rows
                for routing, read in seen
            ]
            loss = self.moe.router_aux_loss_coef * torch.stack(of_passes).sum()
        replayed = [routing for routing, _ in seen if routing.chosen is not None]
        otherwise = torch.stack([routing.otherwise() for routing in replayed]).sum() if replayed else 0
        return Routed(loss, otherwise, sum(routing.used[..., 0].numel() for routing in replayed))

    def _prepare(self, model: PackedModel) -> None:
        if self.moe is None:
            return
        if self.moe.freeze_router:
            for router in routers(model):
                router.requires_grad_(False)
        if self.moe.watches:
            watch_routers(model.model)

    def _forward_pass(self, read: ModelInput, *arguments: object) -> tuple[Tensor, ...]:
        if self.moe is None or not self.moe.watches:
            return super()._forward_pass(read, *arguments)
        assert self._forward is not None, "attach comes first"
        if self._training and self.moe.routing_replay and read.experts is None and read.useful_tokens > 0:
            raise UserError(
                f"`moe.routing_replay` is set for {self.model!r}, and the rows that it is trained on have no `experts`;"
                " train on a `Batch` or a `Rollout`, or leave the setting out"
            )
        model = next(module for module in self._forward.modules() if isinstance(module, PackedModel))
        model.routing = Routing(read.experts if self.moe.routing_replay else None)
        try:
            values = super()._forward_pass(read, *arguments)
        finally:
            routing, model.routing = model.routing, None
        if self._training:
            self._routed.append((routing, read))
        return values

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
