"""`CausalLM`, the language model that an algorithm speaks of, and its scores of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.models.handle import ModelHandle
from rlflow.models.lora import LoRA, adapters_off
from rlflow.models.moe import MoE, Routed, Routing, load_balancing_loss, routers, watch_routers
from rlflow.models.optimizer import Optimizer
from rlflow.models.packed import PackedModel
from rlflow.models.packing import ModelInput, Responses, no_rows, response_mask, take, whole
from rlflow.models.readouts import Divergence, FrozenLayer, OfTokens, states
from rlflow.models.scoring import ScoringModel
from rlflow.values.batch import TokenRows
from rlflow.values.cuts import PerSample, PerToken
from rlflow.values.host_copy import rows_at
from rlflow.values.ragged import Ragged


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

    def logprobs_of(self, rows: Responses, ids: Tensor) -> Tensor:
        """Log-probabilities of given tokens where each response token stands.

        Args:
            rows: A `Batch`, a `Rollout`, or anything with their `prompt_ids`, `response_ids` and `lengths`.
            ids: `[B, T, K]` int64, tokens of the vocabulary; what stands where responses are padded is not read.

        Returns:
            `[B, T, K]`, in float32 (float64 where the model is), 0 where padded.
        """
        if ids.dim() != 3 or ids.shape[:2] != rows.response_ids.shape:
            raise UserError(
                f"`logprobs_of` was given tokens {list(ids.shape)} for responses {list(rows.response_ids.shape)}; give"
                " K tokens for each response token, [B, T, K]"
            )
        return self._of_tokens(rows, OfTokens(), ids)[0]

    def topk(self, rows: Responses, k: int) -> tuple[Tensor, Tensor]:
        """The `k` likeliest tokens where each response token stands, the likeliest first.

        Args:
            rows: As of `logprobs_of`.
            k: From 1 to the size of the vocabulary.

        Returns:
            `[B, T, k]` log-probabilities, with gradients within training, and `[B, T, k]` int64 tokens; 0 where padded.
        """
        if k < 1:
            raise UserError(f"`topk` was asked for {k} tokens; ask for 1 or more")
        logprobs, tokens = self._of_tokens(rows, OfTokens(top=k))
        return logprobs, tokens

    def hidden(self, rows: Responses) -> PerSample:
        """What the output layer reads at the last token of each row; at the prompt's last where there is no response.

        Args:
            rows: As of `logprobs_of`.

        Returns:
            `[B, H]` in float32 (float64 where the model is).
        """
        (states_there,) = self._scores(whole(rows), self.temperature, states)
        return states_there[:, 0]

    def kl(
        self,
        rows: Responses,
        other: CausalLM,
        given: Ragged | None = None,
        over: Literal["self", "other"] = "self",
    ) -> PerToken:
        """The Kullback-Leibler divergence from a frozen model, over the whole vocabulary, at each response token.

        By default it is KL(self || other), the sum of p log(p / q) with p this model's distribution and q that of
        `other`: what distillation calls reverse KL where this model is the student (MiniLLM, arXiv 2306.08543; GKD,
        arXiv 2306.13649). The logits of each model are divided by its own temperature. In a train node, name `other`
        in the mark's `uses`, and read `given` as a value of its own, `Ragged`.

        Args:
            rows: As of `logprobs_of`.
            other: A frozen model of the same vocabulary on the same ranks; no gradient goes to it.
            given: Other prompts, one a row, after which `other` reads the same responses; None for those of `rows`.
            over: Whose distribution the sum is weighted by: `other` gives KL(other || self), forward KL.

        Returns:
            `[B, T]` in nats, in float32 (float64 where the model is), 0 where padded.

        Raises:
            UserError: `other` is trained, has another vocabulary, or `given` is of other rows.
        """
        self._check_kl(rows, other, given, over)

        def divergence(part: Tensor | None) -> tuple[Tensor, ...]:
            own: Responses = rows if part is None else take(rows, part)
            prompts = own.prompt_ids if given is None else given if part is None else given.take(part)
            layer = FrozenLayer(other.plan.gathers)
            with torch.no_grad():
                of_other = TokenRows(prompts, own.response_ids, own.lengths)
                _, (beside,) = other._forward_once(of_other, other.temperature, layer)
            return self._score_once(own, self.temperature, Divergence(layer, over == "other"), beside=beside)

        kl, logprobs = self._by_micro_batch(rows, divergence, () if given is None else (given,))
        self.watch(rows, logprobs)
        return kl

    def _check_kl(self, rows: Responses, other: CausalLM, given: Ragged | None, over: str) -> None:
        if other.trainable:
            raise UserError(
                f"`kl` to {other.model!r}, which is trained: no gradient would go to it; give a frozen model, as"
                f" CausalLM({other.model!r}, trainable=False) or `averaged`"
            )
        if over not in ("self", "other"):
            raise UserError(f"`over` of `kl` is {over!r}; it is 'self' or 'other'")
        if given is not None and len(given) != len(rows.lengths):
            raise UserError(f"`kl` was given {len(given)} other prompts for {len(rows.lengths)} rows; give one a row")

    def _of_tokens(self, rows: Responses, readout: OfTokens, ids: Tensor | None = None) -> tuple[Tensor, ...]:
        def of_part(part: Tensor | None) -> tuple[Tensor, ...]:
            own: Responses = rows if part is None else take(rows, part)
            if ids is None:
                return self._score_once(own, self.temperature, readout)
            asked = ids if part is None else rows_at(ids, part)
            places = response_mask(own).flatten().nonzero().flatten()  # counted on the host: no device is waited for
            return self._score_once(own, self.temperature, readout, beside=rows_at(asked.flatten(0, 1), places))

        logprobs, *found = self._by_micro_batch(rows, of_part)
        self.watch(rows, logprobs)
        return tuple(found)

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

    def averaged(self, decay: float) -> Averaged:
        """A frozen model that follows this one: an exponential moving average of its weights.

        After this model's training in a step, each weight becomes decay * average + (1 - decay) * weight; before, it is
        the model that training starts from. Averages are kept in float32 at least, divided over ranks as this model's
        weights are, and in checkpoints (mean teacher: Tarvainen and Valpola, arXiv 1703.01780).

        Args:
            decay: From 0, this model's own weights of the step before, to below 1.

        Raises:
            UserError: `decay` is outside, this model is frozen, or trains adapters.
        """
        if not 0 <= decay < 1:
            raise UserError(f"`decay` of `averaged` is {decay}; give 0 to below 1, 0.99 say")
        if not self.trainable:
            raise UserError(f"{self.model!r} is frozen, so its average never moves; set `trainable`, or use it itself")
        if self.lora is not None:
            raise UserError(
                f"`averaged` of {self.model!r}, which trains adapters: the product of averaged factors is not the"
                " average of models, and one of whole weights is the second copy that adapters save; leave `lora` out,"
                " or compare with `without_adapters()`"
            )
        return Averaged(self, decay)

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

    def _forward_pass(self, read: ModelInput, *arguments: object) -> tuple[Tensor, ...]:
        assert self._forward is not None, "attach comes first"
        with adapters_off(self._forward):
            return super()._forward_pass(read, *arguments)


class Averaged(CausalLM):
    """The moving average of a trained language model, a model of its own; `CausalLM.averaged` makes it.

    Args:
        owner: The trained model.
        decay: Of the average, a step.
    """

    def __init__(self, owner: CausalLM, decay: float) -> None:
        super().__init__(owner.model, trainable=False, temperature=owner.temperature)
        self.owner = owner
        self.decay = decay

    def _prepare(self, model: PackedModel) -> None:
        super()._prepare(model)
        model.held_as_trained = True


def _ignore(rows: Responses, logprobs: Tensor) -> None:
    """Nobody watches."""
