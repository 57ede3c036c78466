"""`ModelHandle`, a model of an algorithm: what to load, how to train it, and how rows become its forward passes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor, nn

from rlflow.errors import UserError
from rlflow.functional import Aggregation
from rlflow.models.lora import LoRA
from rlflow.models.mixers import has_mixers, reads_side_by_side
from rlflow.models.moe import Routing
from rlflow.models.optimizer import Optimizer
from rlflow.models.packed import PackedModel
from rlflow.models.packing import (
    ALONE,
    ModelInput,
    Peers,
    no_rows,
    on_cpu,
    pack,
    packed_micro_batches,
    pad,
    padded_micro_batches,
    shared_micro_batches,
    take,
    token_counts,
)
from rlflow.values.batch import Pairs, TokenRows
from rlflow.values.host_copy import on_device, rows_at
from rlflow.values.protocols import Tokens
from rlflow.values.ragged import Ragged

# Settings of how a model is trained.
OF_TRAINING = ("epochs", "samples_per_update", "start_step", "gradient_checkpointing", "lora", "moe")


@dataclass(frozen=True)
class ForwardPlan:
    """How rows become forward passes.

    Attributes:
        token_budget: Most tokens of a micro-batch; a longer row stands alone.
        packing: Feed rows without padding. Off, each micro-batch is right-padded.
        share_prefixes: Compute a prefix that several rows of a micro-batch have once, where rows are packed.
        side_by_side: Cut micro-batches as those of padded rows, of like length: mixers pad them, see `MixerOfRows`.
        agree: The largest of the counts that the ranks of the role pass in, a collective; by default of one rank.
        peers: Who divides the lines of this rank's rows; they have the same rows.
        gathers: Whether a weight is whole only while its layer's forward runs.
    """

    token_budget: int = 4096
    packing: bool = True
    share_prefixes: bool = True
    side_by_side: bool = False
    agree: Callable[[int], int] = int
    peers: Peers = ALONE
    gathers: bool = False

    def micro_batches(self, rows: Tokens, prompts: Sequence[Ragged] = ()) -> list[Tensor]:
        """Row numbers of each micro-batch, as many on every rank of the role; there may be empty ones."""
        parts = self.split(rows, prompts=prompts)
        most = self.agree(len(parts))
        return parts if most == len(parts) else self.split(rows, most, prompts)

    def split(self, rows: Tokens | Pairs, at_least: int = 1, prompts: Sequence[Ragged] = ()) -> list[Tensor]:
        """Row numbers of each micro-batch of this rank alone, at least so many; there may be empty ones.

        Args:
            rows: What is scored.
            at_least: Micro-batches.
            prompts: Other prompts of the rows, after which their responses are scored too, in passes of their own.
        """
        if self.packing and self.share_prefixes and not prompts:
            return shared_micro_batches(rows, self.token_budget, at_least)
        cut = packed_micro_batches if self._without_padding else padded_micro_batches
        return cut(self._costs(rows, prompts), self.token_budget, at_least)

    def _costs(self, rows: Tokens | Pairs, prompts: Sequence[Ragged] = ()) -> Tensor:
        """`[B]`, the tokens that each row takes in a forward pass; a pair is two rows of one, padded to the longer.

        With other prompts it is the longest of the row's passes.
        """
        if not isinstance(rows, Pairs):
            costs = token_counts(rows)
            for other in prompts:
                costs = torch.maximum(costs, token_counts(TokenRows(other, rows.response_ids, rows.lengths)))
            return costs
        chosen, rejected = token_counts(rows.chosen), token_counts(rows.rejected)
        return chosen + rejected if self._without_padding else 2 * torch.maximum(chosen, rejected)

    @property
    def _without_padding(self) -> bool:
        return self.packing and not self.side_by_side

    def model_input(self, rows: Tokens) -> ModelInput:
        """What one forward pass over all of `rows` reads."""
        return pack(rows, self.share_prefixes) if self.packing else pad(rows)


@dataclass(eq=False, repr=False)
class ModelHandle(ABC):
    """A model of an algorithm, which a subclass gives methods that score rows. Constructing it loads nothing.

    Every method that scores is a collective of the role's ranks: all of them call it, ranks without rows included.

    Args:
        model: A folder in Hugging Face form, a Hugging Face name, or `tiny`.
        trainable: Whether it is trained; a frozen model has no optimizer and no gradients.
        optimizer: How it is trained; `default_optimizer` where a trainable model is given none.
        epochs: How often each step goes over its rows.
        samples_per_update: Rows of one optimizer update over all ranks; all rows of the step where None.
        start_step: The first step that trains it, counted from 0; before, its train nodes are left out.
        gradient_checkpointing: Trade time for memory in the backward pass.
        lora: Train adapters of these settings, and an output layer of one label, instead of all weights.
        loss_aggregation: How its losses per token become one number; None for as the module's.
        trust_remote_code: Run the code in the folder of its weights (`auto_map`) to load it; read that code first.

    Attributes:
        default_optimizer: Optimizer of a trainable model that is given none.
        in_training: Whether scores carry gradients, and the rows given are one micro-batch; see `training`.
    """

    model: str
    trainable: bool = True
    optimizer: Optimizer | None = None
    _: KW_ONLY
    epochs: int = 1
    samples_per_update: int | None = None
    start_step: int = 0
    gradient_checkpointing: bool = False
    lora: LoRA | None = None
    loss_aggregation: Aggregation | None = None
    trust_remote_code: bool = False

    default_optimizer: ClassVar[Optimizer] = Optimizer()

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise UserError(f"`epochs` is {self.epochs}; give 1 or more")
        if self.samples_per_update is not None and self.samples_per_update < 1:
            raise UserError(f"`samples_per_update` is {self.samples_per_update}; give 1 or more, or null for all rows")
        if self.start_step < 0:
            raise UserError(f"`start_step` is {self.start_step}; give the first step that trains, 0 or more")
        known = get_args(Aggregation)
        if self.loss_aggregation not in (None, *known):
            raise UserError(f"`loss_aggregation` is {self.loss_aggregation!r}; give one of {', '.join(known)}")
        for name, given in (("optimizer", self.optimizer), ("lora", self.lora)):
            if given is not None and not self.trainable:
                raise UserError(
                    f"`{name}` is given for {self.model!r}, which is frozen; set `trainable` or leave it out"
                )
        if self.trainable and self.optimizer is None:
            self.optimizer = self.default_optimizer
        self.plan = ForwardPlan()
        self.unknown = ""  # see `PackedModel.unknown`
        self._forward: nn.Module | None = None
        self.in_training = False

    def load(self, path: Path, dtype: torch.dtype, device: torch.device, empty: bool = False) -> PackedModel:
        """Build the model, with its adapters. A strategy calls it, and attaches what it makes of the result.

        Args:
            path: A folder in Hugging Face form, or a Hugging Face name.
            dtype: Dtype of the parameters.
            device: Device of the parameters.
            empty: Read no weights: parameters are on the device `meta` and take no memory; `fill` reads them.

        Raises:
            UserError: There is no such model, weights are missing, or adapters cannot be given to it.
        """
        model = self.kind.load(
            path, dtype, device, self.gradient_checkpointing, empty, trust_remote_code=self.trust_remote_code
        )
        if model.new_head and not self.trainable:
            raise UserError(
                f"the model {str(path)!r} has no output layer `{model.head}` to score with, as a causal language model"
                " has none, and it is frozen; give a reward model with one label, or train one"
            )
        model.requires_grad_(self.trainable)
        if self.lora is not None:
            model.add_adapters(self.lora, self.model)
        self._prepare(model)
        self.unknown = model.unknown
        return model

    @property
    @abstractmethod
    def kind(self) -> type[PackedModel]:
        """What it is loaded as."""

    def score_nothing(self) -> Tensor:
        """A forward pass over no rows: a number, 0-dim, that depends on every trained weight by a gradient of 0."""
        return self._scores(no_rows())[0].sum()

    def attach(self, forward: nn.Module, plan: ForwardPlan) -> None:
        """Score with `forward` from now on.

        Args:
            forward: What `load` gave, or an engine around it that is called alike.
            plan: How rows become forward passes.
        """
        forward.eval()  # a DeepSpeed engine's returns nothing
        self._forward = forward
        # Rows that share a token would share what dropout does to it; and a shared prefix would need its state.
        noisy = self.lora is not None and self.lora.dropout > 0
        shares = plan.share_prefixes and not noisy and not has_mixers(forward)
        self.plan = replace(plan, share_prefixes=shares, side_by_side=reads_side_by_side(forward))

    def freeze(self) -> None:
        """Train no longer; called before the weights are loaded."""
        self.trainable, self.optimizer = False, None

    def only_scores(self) -> None:
        """Freeze a model that an algorithm was given to score with; called in `configure_models`.

        Raises:
            UserError: Settings of training are given, and the model is not trained.
        """
        defaults = {field.name: field.default for field in fields(self)}
        given = [name for name in OF_TRAINING if name in defaults and getattr(self, name) != defaults[name]]
        if self.optimizer not in (None, self.default_optimizer):
            given.insert(0, "optimizer")
        if given:
            found = f"`{given[0]}` is given for {self.model!r}, which this algorithm does not train; leave it out"
            raise UserError(found, of=self)
        self.freeze()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Within it, scores carry gradients, and the rows given are one micro-batch: one forward pass."""
        assert self.trainable, self.model
        assert self._forward is not None, "attach comes first"
        self._forward.train()
        self.in_training = True
        try:
            yield
        finally:
            self.in_training = False
            self._forward.eval()

    @property
    def several_updates(self) -> bool:
        """Whether a step may make several updates."""
        return self.epochs > 1 or self.samples_per_update is not None

    @property
    def model_inputs(self) -> tuple[str, ...]:
        """The columns of its rows that it is trained with in addition to their tokens, see `MODEL_INPUTS`."""
        return ()

    def take_routed(self) -> tuple[Tensor | None, Tensor | int, int]:
        """What the forward passes within the last `training` recorded about experts; called once.

        Returns:
            The load-balancing loss, 0-dim, summed over their sequences and times its weight: divided by the sequences
            of the whole update it is their part; None where there is none. Then, of pairs of a token and a layer, how
            many had experts replayed that are not those of the model's router, and how many had any replayed.
        """
        return None, 0, 0

    def _prepare(self, model: PackedModel) -> None:  # noqa: B027 - most have no such settings
        """Change a model that was loaded as the handle's settings have it."""

    def _scores(self, rows: Tokens, *arguments: object) -> tuple[Tensor, ...]:
        """What the model computes for each response token of `rows`, `[B, T, ...]` each, 0 where padded.

        Args:
            rows: A `Batch`, a `Rollout`, or anything with their `prompt_ids`, `response_ids` and `lengths`.
            arguments: More arguments of the output layer's forward.
        """
        return self._by_micro_batch(rows, lambda own, _: self._forward_pass(own, *arguments))

    def _by_micro_batch(
        self,
        rows: Tokens,
        score: Callable[[Tokens, Any], tuple[ModelInput, tuple[Tensor, ...]]],
        beside: Tensor | Ragged | None = None,
    ) -> tuple[Tensor, ...]:
        """As `_scores`: in one pass within `training`, else by micro-batch, without gradients.

        Args:
            rows: What is scored.
            score: Calls `_forward_pass` with some rows, and with their part of `beside`.
            beside: More that is read for each row: `[B, ...]`, or other prompts, see `ForwardPlan.split`.
        """
        home = rows.response_ids.device

        def scores(own: Tokens, beside: Tensor | Ragged | None) -> tuple[Tensor, ...]:
            read, values = score(own, beside)
            return tuple(read.unpack(value).to(home) for value in values)

        if self.in_training:
            return scores(rows, beside)
        on_cpu(rows)  # all of them together, not by micro-batch
        with torch.no_grad():
            parts = self.plan.micro_batches(rows, [beside] if isinstance(beside, Ragged) else [])
            found = [scores(take(rows, part), _at(beside, part)) for part in parts]
        order = on_device(torch.cat(parts).argsort(), home)
        return tuple(torch.cat(values)[order] for values in zip(*found, strict=True))

    def _forward_pass(
        self, rows: Tokens, *arguments: object, beside: Tensor | None = None
    ) -> tuple[ModelInput, tuple[Tensor, ...]]:
        """One forward pass over all of `rows`: what it read of the line, and the values of the whole line, `[R, ...]`.

        Args:
            rows: All rows.
            arguments: More arguments of the output layer's forward.
            beside: `[R, ...]`, see `ModelInput.beside`.
        """
        assert self._forward is not None, "attach comes first"
        peers = self.plan.peers
        parts = replace(self.plan.model_input(rows), beside=beside).divide(peers.size)
        read = parts[peers.rank].to(next(self._forward.parameters()).device)
        last = () if read.beside is None else (read.beside,)
        more = {"routing": self._routing(read), "prefixes": read.prefixes}
        values = self._forward(*read.arguments(), *arguments, *last, **more)
        return read, read.in_order(peers.gather(values, [len(part.scored) for part in parts]))

    def _routing(self, read: ModelInput) -> Routing | None:
        """The experts of a forward pass; None where they are neither given nor recorded."""
        return None


def _at(beside: Tensor | Ragged | None, index: Tensor) -> Tensor | Ragged | None:
    """The part of `beside` that belongs to the rows at `index`."""
    if beside is None:
        return None
    return beside.take(index) if isinstance(beside, Ragged) else rows_at(beside, index)
