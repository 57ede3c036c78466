"""`CausalLM`, the language model that an algorithm speaks of, and models that follow one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.models.language_scores import LanguageScores
from rlflow.models.lora import LoRA, adapters_off
from rlflow.models.moe import MoE
from rlflow.models.optimizer import Optimizer
from rlflow.models.packed import PackedModel
from rlflow.models.packing import ModelInput
from rlflow.models.scoring import ScoringModel

HOTTEST = 1e4  # a temperature; logits over its inverse are numbers in float16 still


class Generator(Protocol):
    """Samples responses with one model's weights."""

    def __call__(
        self, rows: Any, n: int, temperature: float, max_new_tokens: int | None, stop: tuple[int, ...]
    ) -> Any: ...


class CausalLM(LanguageScores):
    """A language model of an algorithm: `CausalLM("Qwen/Qwen2.5-1.5B")`. Constructing it loads nothing.

    Every method that scores is a collective of the role's ranks: all of them call it, ranks without rows included.

    Args:
        model: A folder in Hugging Face form, a Hugging Face name, or `tiny`.
        trainable: Whether it is trained; a frozen model has no optimizer and no gradients.
        optimizer: How it is trained; `Optimizer()` where a trainable model is given none.
        temperature: Of sampling, in validation too; divides the logits of every score alike.
        epochs: How often each step goes over its rows.
        samples_per_update: Rows of one optimizer update over all ranks; all rows of the step where None.
        start_step: The first step that trains it, counted from 0; before, its train nodes are left out.
        gradient_checkpointing: Trade time for memory in the backward pass.
        lora: Train adapters of these settings instead of all weights.
        moe: How routers and experts of a mixture of experts are trained; None for as all weights are.
        trust_remote_code: Run the code that lies beside its weights (`auto_map`) to load it; read that code first.
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
        trust_remote_code: bool = False,
    ) -> None:
        if not 1 / HOTTEST <= temperature <= HOTTEST:
            raise UserError(
                f"`temperature` is {temperature}; it divides the logits, so give a number from {1 / HOTTEST:g} to"
                f" {HOTTEST:g}"
            )
        super().__init__(
            model,
            trainable,
            optimizer,
            epochs,
            samples_per_update,
            start_step,
            gradient_checkpointing,
            lora,
            trust_remote_code=trust_remote_code,
        )
        self._train_routers(moe)
        self.temperature = temperature
        self._generator: Generator | None = None
        self._converser: Callable[..., Any] | None = None

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

        Rows of a `Rollout` are continued: the model reads prompt and response, and the response grows. What has ended
        has one child, its copy. Inherited tokens keep ids, log-probabilities and versions. Of the rows
        that a node returns, the first alone keeps them in its `loss_mask`: so each token is trained once, however many
        rows share it.

        Args:
            rows: Prompts, `B` rows: `batch`, or what `Rollout.as_prompts` makes of responses; or a `Rollout` that this
                model wrote, some rows of one, or what `Rollout.cut` leaves of them.
            n: Responses to each, or continuations; consecutive rows.
            temperature: Instead of the model's own; 0 takes the likeliest token.
            max_new_tokens: By how many tokens a response grows at most. It is never longer than the module's
                `max_response_length`, which is the default.
            stop: Tokens that end a response beside those that always do.

        Returns:
            A `Rollout` of `B * n` rows, whose parents are `rows`; fewer where some of them have ended.

        Raises:
            UserError: No run is in progress, the node does not name this model, or `rows` have no place in the step.
        """
        if self._generator is None:
            raise UserError(
                f"{self.model!r} generates in nodes that `Trainer.fit` runs; there is no step in progress here"
            )
        chosen = self.temperature if temperature is None else temperature
        return self._generator(rows, n, chosen, max_new_tokens, tuple(stop))

    def converse(
        self,
        rows: Any,
        environment: Any,
        n: int = 1,
        *,
        players: Mapping[str, CausalLM] = MappingProxyType({}),
        temperature: float | None = None,
        stop: Sequence[int] = (),
    ) -> Any:
        """Hold `n` conversations of this model with an environment from each row, in a node marked as for `generate`.

        A response is then all that follows the prompt, turn after turn, at most `max_response_length` tokens long. The
        tokens that the environment wrote are in it, and False in `loss_mask`; those that the model sampled are never
        tokenised again.

        Args:
            rows: Prompts of the dataset, `B` rows. Messages of the dataset's prompts begin the conversations, with
                what the environment adds, and the tools in the form of the model's chat template.
            environment: An `rlflow.Environment`.
            n: Conversations from each; consecutive rows.
            players: Who speaks for a seat of an environment that has several, by its name: models of the module,
                trained or frozen, which the node names beside this one. This model speaks for all other seats.
            temperature: Instead of the model's own; 0 takes the likeliest token.
            stop: Tokens that end a turn beside those that always do.

        Returns:
            A `Rollout` of `B * n` rows, with `turn`, `returns` and `ended`. Where an environment has seats, a row for
            each of those that this model speaks for, in consecutive rows: of a game, what that seat read and said. What
            others said is among what it read.

        Raises:
            UserError: As of `generate`; or the environment failed, and its `on_failure` is `raise`.
        """
        if self._converser is None:
            raise UserError(
                f"{self.model!r} converses in nodes that `Trainer.fit` runs; there is no step under way here"
            )
        return self._converser(rows, environment, n, temperature, tuple(stop), players)

    def attach_generator(self, generator: Generator, converser: Callable[..., Any]) -> None:
        """Called before the first step, with what the module generates and converses with this model by."""
        self._generator = generator
        self._converser = converser

    def initial(self) -> CausalLM:
        """A frozen model as this one is before training: without its adapters if it has any, else loaded once more."""
        if self.lora is not None:
            return self.without_adapters()
        return CausalLM(
            self.model, trainable=False, temperature=self.temperature, trust_remote_code=self.trust_remote_code
        )

    def only_scores(self, like: CausalLM | None = None) -> None:
        """See `ModelHandle.only_scores`.

        Args:
            like: The model that it is compared with, whose temperature is its own from now on.

        Raises:
            UserError: It has a temperature of its own, and another one.
        """
        super().only_scores()
        if like is not None:
            if self.temperature not in (1.0, like.temperature):
                raise UserError(
                    f"`temperature` is {self.temperature} for {self.model!r} and {like.temperature} for {like.model!r},"
                    " and distributions of one temperature are compared; leave the first out",
                    of=self,
                )
            self.temperature = like.temperature

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

    def _read(self, path: Path, dtype: torch.dtype, device: torch.device, empty: bool) -> ScoringModel:
        return ScoringModel.load(path, dtype, device, self.gradient_checkpointing, empty, self.trust_remote_code)


class WithoutAdapters(CausalLM):
    """A language model with its adapters off, on its owner's engine; `CausalLM.without_adapters` makes it.

    Args:
        owner: The trained model.
    """

    def __init__(self, owner: CausalLM) -> None:
        super().__init__(
            owner.model, trainable=False, temperature=owner.temperature, trust_remote_code=owner.trust_remote_code
        )
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
        super().__init__(
            owner.model, trainable=False, temperature=owner.temperature, trust_remote_code=owner.trust_remote_code
        )
        self.owner = owner
        self.decay = decay

    def _prepare(self, model: PackedModel) -> None:
        super()._prepare(model)
        model.held_as_trained = True
