"""`ModelHandle`, a model of an algorithm: which model to load, how to train it, and how it scores rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from rlflow.models.optimizer import MOST, Optimizer
from rlflow.models.packed import PackedModel
from rlflow.models.packing import (
    ALONE,
    PICTURES,
    ModelInput,
    Peers,
    columns_of,
    no_rows,
    on_cpu,
    pack,
    packed_micro_batches,
    pad,
    padded_micro_batches,
    patch_counts,
    shared_micro_batches,
    take,
    token_counts,
    whole,
)
from rlflow.models.picture_processor import PictureProcessor, PictureReader, no_pictures
from rlflow.values.batch import Pairs, TokenRows
from rlflow.values.host_copy import on_device, on_host, rows_at
from rlflow.values.picture import Picture
from rlflow.values.protocols import Tokens
from rlflow.values.ragged import Ragged

# Settings that only a trained model has.
OF_TRAINING = (
    "epochs",
    "samples_per_update",
    "start_step",
    "gradient_checkpointing",
    "lora",
    "freeze_vision_tower",
    "vision_tower_lr",
    "moe",
)


@dataclass(frozen=True)
class ForwardPlan:
    """Plan by which rows are split into micro-batches and laid out for forward passes.

    Attributes:
        token_budget: Most tokens of a micro-batch; a longer row is alone in one.
        packing: Feed rows without padding. If off, each micro-batch is right-padded.
        share_prefixes: If rows are packed, compute a prefix once that several rows of a micro-batch share.
        side_by_side: Plan micro-batches as for padded rows, since mixers pad the rows of a line, see `MixerOfRows`.
        agree: Function that returns the largest number that any rank of the role passes to it; a collective of these
            ranks. The default is for one rank.
        reader: Reader of the rows' pictures; None for a model that reads text alone.
        peers: The ranks that divide each line among them; all of them have the rows of this rank.
        gathers: Whether a weight is whole only while its layer's forward runs.
    """

    token_budget: int = 4096
    packing: bool = True
    share_prefixes: bool = True
    side_by_side: bool = False
    agree: Callable[[int], int] = int
    reader: PictureReader | None = None
    peers: Peers = ALONE
    gathers: bool = False

    def micro_batches(self, rows: Tokens, prompts: Sequence[Ragged] = ()) -> list[Tensor]:
        """Row numbers of each micro-batch; every rank of the role has the same number of these, some may be empty."""
        parts = self.split(rows, prompts=prompts)
        most = self.agree(len(parts))
        return parts if most == len(parts) else self.split(rows, most, prompts)

    def split(self, rows: Tokens | Pairs, at_least: int = 1, prompts: Sequence[Ragged] = ()) -> list[Tensor]:
        """Row numbers of each micro-batch of this rank; some micro-batches may be empty.

        Args:
            rows: Rows to score.
            at_least: Least number of micro-batches.
            prompts: Further prompts of the rows, for passes of their own that score the same responses after these.
        """
        if self.shares_prefixes and not prompts:
            return shared_micro_batches(rows, self.token_budget, at_least, self.reader)
        cut = packed_micro_batches if self._without_padding else padded_micro_batches
        costs = self._costs(rows, prompts) + patch_counts(rows, self.reader)
        return cut(costs, self.token_budget, at_least)

    def _costs(self, rows: Tokens | Pairs, prompts: Sequence[Ragged] = ()) -> Tensor:
        """`[B]`, the tokens of each row in a forward pass. A pair counts its two rows, padded to the longer if padded.

        With other prompts, a row counts the tokens of its longest pass.
        """
        if not isinstance(rows, Pairs):
            costs = token_counts(rows)
            for other in prompts:
                costs = torch.maximum(costs, token_counts(TokenRows(other, rows.response_ids, rows.lengths)))
            return costs
        chosen, rejected = token_counts(rows.chosen), token_counts(rows.rejected)
        return chosen + rejected if self._without_padding else 2 * torch.maximum(chosen, rejected)

    @property
    def shares_prefixes(self) -> bool:
        """Whether a prefix of several rows is computed once."""
        return self.packing and self.share_prefixes

    @property
    def _without_padding(self) -> bool:
        return self.packing and not self.side_by_side

    def model_input(self, rows: Tokens) -> ModelInput:
        """The input of one forward pass over all of `rows`."""
        return pack(rows, self.share_prefixes, self.reader) if self.packing else pad(rows, self.reader)


@dataclass(eq=False, repr=False)
class ModelHandle(ABC):
    """A model of an algorithm; subclasses add methods that score rows. Constructing it loads nothing.

    Every method that scores is a collective: all ranks of the role must call it, even ranks that have no rows.

    Args:
        model: A folder in Hugging Face form, of a run or of a checkpoint, a Hugging Face name, or `tiny`.
        trainable: Whether the model is trained. A frozen model has no optimizer and no gradients.
        optimizer: Optimizer of the model; a trainable model without this argument has `default_optimizer`.
        epochs: Number of passes of each step over its rows.
        samples_per_update: Number of rows of one optimizer update, over all ranks. If `loss_aggregation` is
            `episode-mean`, it counts episodes. None for one update with all rows of the step.
        start_step: The first step that trains the model, counted from 0. Earlier steps skip its train nodes.
        gradient_checkpointing: Compute activations again in the backward pass, which saves memory and takes time.
        lora: Settings of adapters, which are trained, with an output layer of one label, instead of all weights.
        freeze_vision_tower: In a model that reads images, do not train the vision tower and the layers between it
            and the decoder. LoRA adapts only the decoder.
        vision_tower_lr: Learning rate of the vision tower and these layers, in place of `optimizer.lr`. Warm-up and
            schedule are the same. None for `optimizer.lr`.
        loss_aggregation: Reduction of the model's losses per token to one number; None for the module's own way.
        trust_remote_code: Run the code in the folder of the model's weights (`auto_map`) to load it; read it first.

    Attributes:
        default_optimizer: Optimizer of a trainable model that is given none.
        in_training: Whether scores carry gradients and the given rows are one micro-batch; see `training`.
        reads_pictures: Whether the model has a tower for pictures; set as a run is prepared.
        album: Function from numbers of pictures to the pictures, on this rank.
        unread_placeholder: Id of the token in whose place other models of the run read pictures, and this one cannot.
        shown: Result of `named_parameters` within the module's `configure_optimizers`.
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
    freeze_vision_tower: bool = False
    vision_tower_lr: float | None = None
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
        if self._of_tower and (not self.trainable or self.lora is not None):
            why = "trains adapters alone" if self.lora is not None else "is frozen"
            raise UserError(f"`{self._of_tower}` is set for {self.model!r}, which {why}; leave it out")
        if self.vision_tower_lr is not None:
            if self.freeze_vision_tower:
                raise UserError("`vision_tower_lr` is set, and `freeze_vision_tower` too; leave one of them out")
            if not 0 <= self.vision_tower_lr <= MOST["lr"]:
                raise UserError(f"`vision_tower_lr` is {self.vision_tower_lr}; give a number from 0 to {MOST['lr']:g}")
        if self.trainable and self.optimizer is None:
            self.optimizer = self.default_optimizer
        self.plan = ForwardPlan()
        self.remarks: list[str] = []  # see `PackedModel.remarks`
        self._forward: nn.Module | None = None
        self._processor: PictureProcessor | None = None
        self.in_training = False
        self.reads_pictures = False
        self.album: Callable[[Sequence[int]], Sequence[Picture]] = no_pictures
        self.unread_placeholder: int | None = None
        self.shown: Mapping[str, nn.Parameter] = {}

    def load(self, path: Path, dtype: torch.dtype, device: torch.device, empty: bool = False) -> PackedModel:
        """Build the model with its adapters. A strategy calls this, wraps the result, and passes it to `attach`.

        Args:
            path: A folder in Hugging Face form, or a Hugging Face name.
            dtype: Dtype of the parameters.
            device: Device of the parameters.
            empty: Read no weights: parameters are on the device `meta` and take no memory; `fill` reads them.

        Raises:
            UserError: There is no such model, weights are missing, or it cannot have these adapters.
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
            base = str(path) if Path(self.model).is_dir() else self.model  # of a run the folder `model` in it
            model.add_adapters(self.lora, base)
        self._prepare(model)
        self.remarks = model.remarks
        self._processor = model.processor
        return model

    @property
    @abstractmethod
    def kind(self) -> type[PackedModel]:
        """The class of the module that is loaded."""

    def score_nothing(self) -> Tensor:
        """A forward pass over no rows: a number, 0-dim, that depends on every trained weight by a gradient of 0."""
        return self._scores(no_rows())[0].sum()

    @property
    def drops_out(self) -> bool:
        """Whether adapters drop some of their inputs at random."""
        return self.lora is not None and self.lora.dropout > 0

    def attach(self, forward: nn.Module, plan: ForwardPlan) -> None:
        """Score with `forward` from now on.

        Args:
            forward: The module that `load` returned, or a wrapper of it with the same `forward`.
            plan: Plan by which rows are laid out for forward passes.
        """
        forward.eval()  # not chained: that of a DeepSpeed engine returns nothing
        self._forward = forward
        # Rows that share a token would also share its dropout, and its state.
        shares = plan.share_prefixes and not self.drops_out and not has_mixers(forward)
        reader = plan.reader if self._processor is None else PictureReader(self._processor, self.album)
        self.plan = replace(plan, share_prefixes=shares, side_by_side=reads_side_by_side(forward), reader=reader)

    def freeze(self) -> None:
        """Freeze the model; called before the weights are loaded."""
        self.trainable, self.optimizer = False, None

    def only_scores(self) -> None:
        """Freeze a model that an algorithm was given to score with; called in `configure_models`.

        Raises:
            UserError: The model was given settings of training.
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
        """A context in which scores carry gradients, and the given rows are one micro-batch: one forward pass."""
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
        """The columns of rows that the model reads in addition to their tokens, see `MODEL_INPUTS`."""
        return ("pictures",) if self.reads_pictures else ()

    def take_routed(self) -> tuple[Tensor | None, Tensor | int, int]:
        """The record of experts from the forward passes within the last `training`; called once.

        Returns:
            The load-balancing loss, 0-dim, summed over the sequences and times its weight; None where there is none.
            Divide it by the number of sequences of the whole update. Then two counts of pairs of a token and a layer:
            those whose replayed experts differ from the router's choice, and all that had replayed experts.
        """
        return None, 0, 0

    @property
    def _of_tower(self) -> str:
        """The setting of the tower that is given; empty for none."""
        if self.freeze_vision_tower:
            return "freeze_vision_tower"
        return "" if self.vision_tower_lr is None else "vision_tower_lr"

    def _prepare(self, model: PackedModel) -> None:
        """Apply the handle's settings to a model that was loaded."""
        if self._of_tower and model.processor is None:
            raise UserError(f"`{self._of_tower}` is set for {self.model!r}, which has no tower; leave it out")
        if self.freeze_vision_tower:
            for parameter in model.tower_parameters():
                parameter.requires_grad_(False)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The weights that are trained, by name, for the module's `configure_optimizers`; they have shapes, no values.

        Raises:
            UserError: It is called elsewhere: what a rank holds of a weight depends on the strategy.
        """
        if not self.shown:
            raise UserError(
                f"the parameters of {self.model!r} are read outside of `configure_optimizers`, or no node trains it;"
                " read the parameters of a trained model there"
            )
        yield from self.shown.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The weights of `named_parameters` without their names."""
        for _, parameter in self.named_parameters():
            yield parameter

    def parameter_groups(self, model: PackedModel) -> list[dict[str, Any]]:
        """The trained weights in groups of one learning rate: all; or the decoder, then the tower.

        Args:
            model: The loaded model.

        Returns:
            Groups as torch's optimizers take them. `highest_lr` of a group is in place of `optimizer.lr`.
        """
        trained = [weight.parameter for weight in model.trained()]
        if self.vision_tower_lr is None:
            return [{"params": trained}]
        tower = {*model.tower_parameters()}
        return [
            {"params": [parameter for parameter in trained if parameter not in tower]},
            {"params": [parameter for parameter in trained if parameter in tower], "highest_lr": self.vision_tower_lr},
        ]

    def _scores(self, rows: Tokens, *arguments: object, at_end: bool = False) -> tuple[Tensor, ...]:
        """Values that the output layer computes for each response token, `[B, T, ...]` each, 0 where padded.

        Args:
            rows: A `Batch`, a `Rollout`, or anything with their `prompt_ids`, `response_ids` and `lengths`.
            arguments: Further arguments of the output layer's forward.
            at_end: Compute them for the last token of each row alone, `[B, 1, ...]`, see `whole`.
        """
        return self._by_micro_batch(rows, lambda own, _: self._forward_pass(own, *arguments), at_end=at_end)

    def _by_micro_batch(
        self,
        rows: Tokens,
        score: Callable[[Tokens, Any], tuple[ModelInput, tuple[Tensor, ...]]],
        extra: Tensor | Ragged | None = None,
        at_end: bool = False,
    ) -> tuple[Tensor, ...]:
        """Like `_scores`: in one pass within `training`, else by micro-batch, without gradients.

        Args:
            rows: Rows to score.
            score: Function that takes some of the rows, and the part of `extra` that belongs to them, and returns the
                result of `_forward_pass` for these.
            extra: A further tensor `[B, ...]` with an entry for each row, such as tokens to score; or further prompts,
                see `ForwardPlan.split`. None for neither.
            at_end: See `_scores`.
        """
        self._check_pictures(rows)
        rows = whole(rows) if at_end else rows  # not checked: responses, in which a placeholder is a token
        device = rows.response_ids.device

        def scores(own: Tokens, extra: Tensor | Ragged | None) -> tuple[Tensor, ...]:
            read, values = score(own, extra)
            return tuple(read.unpack(value).to(device) for value in values)

        if self.in_training:
            return scores(rows, extra)
        on_cpu(rows)  # one transfer for all rows, not one for each micro-batch
        with torch.no_grad():
            parts = self.plan.micro_batches(rows, [extra] if isinstance(extra, Ragged) else [])
            found = [scores(take(rows, part), _at(extra, part)) for part in parts]
        order = on_device(torch.cat(parts).argsort(), device)
        return tuple(torch.cat(values)[order] for values in zip(*found, strict=True))

    def _forward_pass(self, rows: Tokens, *arguments: object) -> tuple[ModelInput, tuple[Tensor, ...]]:
        """One forward pass over `rows`: the input that this rank read, and the values `[R, ...]` of the whole line.

        Args:
            rows: Rows of the forward pass.
            arguments: Further arguments of the output layer's forward. A tensor is `[R, ...]`, with an entry for each
                scored token; a rank that scores a part of them gets its entries.
        """
        assert self._forward is not None, "attach comes first"
        peers = self.plan.peers
        head_inputs = tuple(each for each in arguments if isinstance(each, Tensor))
        parts = replace(self.plan.model_input(rows), head_inputs=head_inputs).divide(peers.size)
        read = parts[peers.rank].to(next(self._forward.parameters()).device)
        own = iter(read.head_inputs)
        last = [next(own) if isinstance(each, Tensor) else each for each in arguments]
        more = {"routing": self._routing(read), "prefixes": read.prefixes, "pictures": read.pictures}
        values = self._forward(*read.arguments(), *last, **more)
        return read, read.in_order(peers.gather(values, [len(part.scored) for part in parts]))

    def _check_pictures(self, rows: Tokens) -> None:
        """Refuse prompts with places for pictures where no pictures are read: their placeholders would be tokens."""
        reader = self.plan.reader
        placeholder = self.unread_placeholder if reader is None else reader.processor.placeholder_id
        if placeholder is None or (reader is not None and PICTURES in columns_of(rows)):
            return
        if bool((on_host(rows.prompt_ids.values) == placeholder).any()):
            why = (
                "reads text alone, and it is given prompts with images; take a model that reads images"
                if reader is None
                else "is given prompts that have places for images without the images; score rows of a step"
            )
            raise UserError(f"{self.model!r} {why}, or have the node make prompts of text (`as_prompts`)")

    def _routing(self, read: ModelInput) -> Routing | None:
        """The object that replays or records the experts of a forward pass; None where neither is done."""
        return None


def _at(extra: Tensor | Ragged | None, index: Tensor) -> Tensor | Ragged | None:
    """The part of `extra` that belongs to the rows at `index`."""
    if extra is None:
        return None
    return extra.take(index) if isinstance(extra, Ragged) else rows_at(extra, index)
