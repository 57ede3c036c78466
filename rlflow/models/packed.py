"""A Hugging Face model that reads packed rows: a strategy trains it, and a handle calls it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from rlflow.errors import UserError
from rlflow.models.attention import PACKED_ATTENTION, Attention, packed_attention
from rlflow.models.lora import LoRA, adapter_of, add_adapters, save_adapter
from rlflow.models.mixers import ROW_NUMBERS, has_mixers, keep_rows_apart, reads_side_by_side, row_numbers, slow_states
from rlflow.models.moe import ROUTING, Routing
from rlflow.models.packing import ALONE, ModelInput, Peers, pack, whole
from rlflow.models.picture_processor import (
    PictureProcessor,
    PictureReader,
    PicturesRead,
    class_of,
    copy_processor,
    no_pictures,
    reads_pictures,
)
from rlflow.models.prefixes import SHORTEST, Prefixes, gather
from rlflow.models.remote_code import register_decoder, stored_code
from rlflow.models.weight_files import WeightFiles, finish, not_finite, write_generation_config
from rlflow.models.weights import Weight, is_adapter, plain_name, stored_buffers
from rlflow.storage.safetensors_files import is_finite
from rlflow.values.batch import TokenRows
from rlflow.values.ragged import Ragged

OUTPUT_LAYERS = ("lm_head", "score")  # that a model of the other kind leaves in its files
SCALAR_AUTO_CLASS = "AutoModelForSequenceClassification"  # transformers' class of models with one label


class PackedModel(nn.Module):
    """A transformers model with its output layer replaced by one that a subclass needs.

    Parameters keep their Hugging Face names behind the prefix `model.`. It is called with `ModelInput.arguments`, one
    by one, because DeepSpeed looks for tensors among the arguments and not inside them.

    Args:
        model: The transformers model; its attention and how its linear layers compute on the CPU are replaced.
    """

    auto_class = "AutoModelForCausalLM"  # transformers' class that reads it
    head: str | None = None  # name of an output layer of one label, which adapters leave to be trained as a whole
    new_head = False  # the files have none, and it starts with zeros

    def __init__(self, model: Any) -> None:
        from transformers import AttentionInterface

        super().__init__()
        AttentionInterface.register(PACKED_ATTENTION, packed_attention)
        _attend(model, PACKED_ATTENTION)
        use_onednn(model)
        keep_rows_apart(model)
        self.has_mixers = has_mixers(model)
        self.model = model
        self.dtype: torch.dtype = model.dtype  # that it computes in, whatever its parameters are held in
        self.divided: Attention | None = None  # attends over a line that ranks divide among them
        self.lora: LoRA | None = None
        self.base = ""  # what adapters belong to
        self.base_digest = ""  # `digest_of` it; set by who can see all of its weights
        self.held_as_trained = False  # frozen weights are held in the dtype of trained ones, to be moved in it
        self.remarks: list[str] = []  # lines that its user should read once
        self.files: WeightFiles | None = None  # of a model that was built empty, until `fill` reads them
        self.processor: PictureProcessor | None = None  # of a model that reads pictures
        self.path: Path | None = None  # of the files that belong to the processor

    @classmethod
    def load(
        cls,
        path: Path,
        dtype: torch.dtype,
        device: torch.device,
        gradient_checkpointing: bool = False,
        empty: bool = False,
        trust_remote_code: bool = False,
    ) -> Self:
        """Read a model; `check` says whether it is scored rightly. It is in evaluation mode, without dropout.

        Args:
            path: Folder or Hugging Face name.
            dtype: Dtype of the parameters.
            device: Device of the parameters.
            gradient_checkpointing: Keep each layer's input only, and compute the rest again in the backward pass.
            empty: See `ModelHandle.load`.
            trust_remote_code: See `ModelHandle`.

        Raises:
            UserError: There is no such model, or weights are missing, NaN or infinite.
        """
        scalar = cls.head is not None
        may_lack = {f"{cls.head}.weight", f"{cls.head}.bias"} if scalar else set()
        settings: dict[str, Any] = {"num_labels": 1} if scalar else {}
        if empty:
            settings |= {"device_map": "meta", "use_safetensors": True}
        if dtype == torch.float64:
            settings["experts_implementation"] = "eager"  # torch's grouped products know no float64
        files = WeightFiles(path) if empty else None
        with torch.random.fork_rng(devices=[], enabled=scalar):  # transformers draws an output layer that is missing
            found, report = _from_pretrained(cls.auto_class, path, trust_remote_code, dtype=dtype, **settings)
        _require_weights(path, report, may_lack)
        for name, tensor in () if empty else found.named_parameters():  # a buffer may hold the infinity of a mask
            if not is_finite(tensor):
                raise UserError(not_finite(path, name))
        for module in found.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            for name in [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]:
                setattr(module, name, 0.0)  # as OPT has it, whose layers call torch's function
        if files is None:
            found.to(device)
        else:
            finish(found, files)
        if gradient_checkpointing:
            found.gradient_checkpointing_enable({"use_reentrant": False})
        model = cls(found.eval())
        if reads_pictures(found.config):
            model.processor, model.path = PictureProcessor.load(path, found.config), path
        model.files, model.new_head = files, bool(report["missing_keys"])
        lines = (_unknown(path, found, report["unexpected_keys"]), slow_states(found, device))
        model.remarks = [line for line in lines if line]
        if model.new_head and not empty:
            model.output_layer.zero()
        return model

    def use_float32_head(self) -> None:
        """Compute the output layer in float32 or wider; layers of one label always do."""

    def add_adapters(self, lora: LoRA, base: str) -> None:
        """Freeze the model except for new adapters, and for an output layer of its own kind.

        Args:
            lora: Settings of the adapters.
            base: The model's name, for those who load the adapters.
        """
        self.lora, self.base = lora, base
        add_adapters(self.model, lora, self.head)

    @torch.no_grad()
    def check(
        self, forward: nn.Module, device: torch.device, share_prefixes: bool = False, peers: Peers = ALONE
    ) -> None:
        """Refuse a model that is scored differently from its own forward; called by all ranks that hold it.

        A state that passes from row to row is a small difference, which rounding to bfloat16 would hide: where layers
        carry one, the same is compared in float32 too. Kernels are left to the model's own dtype.

        Args:
            forward: This module, or what training runs it through; the ranks make equally many passes.
            device: Device of the inputs.
            share_prefixes: Whether rows that begin alike share the tokens of it.
            peers: Ranks that have the other parts of lines, where lines are divided.

        Raises:
            UserError: The packed forward gives other scores, or that of divided lines does: a layer looks at other
                tokens than by attention, and needs the whole line.
        """
        forward.eval()
        rows = probe(self.model.config.get_text_config().vocab_size)
        reader = None if self.processor is None else PictureReader(self.processor, no_pictures)
        line, attention, self.divided = pack(rows, share_prefixes, reader), self.divided, None
        fix = ", or set `strategy.init_args.share_prefixes: false`" if share_prefixes else ""
        packed, own = self._scored_both_ways(forward, rows, line.to(device))
        self._refuse_unlike(packed, own, "its own forward and the packed one", fix)
        if reads_side_by_side(self) and self.dtype in NARROW:
            with Float32Arithmetic():
                wide = self._scored_both_ways(forward, rows, line.to(device))
            self._refuse_unlike(*wide, "its own forward and the packed one, in float32,", dtype=torch.float32)
        self.divided = attention
        if attention is None:
            return
        parts = line.divide(peers.size)
        own_part = parts[peers.rank].to(device)
        values = forward(*own_part.arguments(), prefixes=own_part.prefixes)
        found, *_ = own_part.in_order(peers.gather(values, [len(part.scored) for part in parts]))
        self._refuse_unlike(found, packed, "forwards of whole sequences and of divided ones")

    def _scored_both_ways(self, forward: nn.Module, rows: TokenRows, line: ModelInput) -> tuple[Tensor, Tensor]:
        """`[R]` each: the scores of rows by the packed forward of their line, and by the model's own of each row."""
        sequences = zip(whole(rows).prompt_ids.rows(), rows.prompt_ids.lengths.tolist(), strict=True)
        with self._as_transformers_has_it():
            own = [self.own_scores(forward, row.to(line.input_ids.device), prompt) for row, prompt in sequences]
        packed = forward(*line.arguments(), prefixes=line.prefixes, pictures=line.pictures)[0]
        return packed, torch.cat(own)

    def _refuse_unlike(
        self, found: Tensor, expected: Tensor, ways: str, fix: str = "", dtype: torch.dtype | None = None
    ) -> None:
        """Refuse a model with other scores `[R]`: it scales or caps outputs, or has its own attention or a state."""
        largest = max(1.0, float(expected.abs().mean()))
        allowed = largest * (1e-3 if (dtype or self.dtype) in (torch.float32, torch.float64) else 0.25)
        difference = float((found - expected).abs().mean())
        if not difference <= allowed:
            raise UserError(
                f"{type(self.model).__name__} cannot be scored here: {ways} differ by {difference:.2g} per token "
                f"(allowed {allowed:.2g}); use a model with plain causal attention and plain logits{fix}"
            )

    @contextmanager
    def _as_transformers_has_it(self) -> Iterator[None]:
        """A context in which this module, wrapped or not, takes `input_ids` to the logits of the model's own forward.

        A wrapper has its hooks at the modules that hold weights. So these modules are called, with other forwards.
        """
        this: Any = self
        head = self.output_layer
        _attend(self.model, "eager")
        this.forward = lambda input_ids: self.model(input_ids=input_ids, use_cache=False).logits
        head.forward = head.logits
        try:
            yield
        finally:
            del this.forward, head.forward
            _attend(self.model, PACKED_ATTENTION)

    @abstractmethod
    def own_scores(self, forward: nn.Module, tokens: Tensor, prompt: int) -> Tensor:
        """`[response]`, scores of one row by the model's own forward; its first `prompt` tokens are the prompt."""

    @property
    @abstractmethod
    def output_layer(self) -> Any:
        """The layer from hidden states to scores; its `logits` are those of the layer that it replaced."""

    @staticmethod
    def hf_name(name: str) -> str:
        """The Hugging Face name of a parameter of this module; of an adapter's, the name in peft's files."""
        return plain_name(name.removeprefix("model."))

    def weights(self) -> list[Weight]:
        """The weights that the forward computes with, each adapter merged into its weight; tied weights come once.

        Buffers that files hold are among them, such as the bias that corrects a router's choice of experts.
        """
        adapters = {} if self.lora is None else adapter_of(self)
        found = [
            Weight(self.hf_name(name), parameter, adapters.get(name))
            for name, parameter in self.named_parameters()
            if not is_adapter(name)
        ]
        return found + [Weight(plain_name(name), buffer) for name, buffer in stored_buffers(self.model)]

    def trained(self) -> list[Weight]:
        """The weights that an optimizer changes."""
        return [
            Weight(self.hf_name(name), parameter)
            for name, parameter in self.named_parameters()
            if parameter.requires_grad
        ]

    def untrained_record(self) -> dict[str, Any]:
        """Facts on which `trained` depends and that it lacks: JSON-able, to be compared when training is resumed."""
        if self.lora is None:
            return {}
        targets = self.lora.targets if isinstance(self.lora.targets, str) else sorted(self.lora.targets)
        return {
            "rank": self.lora.rank,
            "alpha": self.lora.alpha,
            "targets": targets,
            "base": self.base_digest,
        }

    def saved(self) -> list[Weight]:
        """The weights that are written: the adapters if there are any, else all."""
        return self.weights() if self.lora is None else self.trained()

    def in_files(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights by their names in transformers' files, which may have a layer's fused experts one by one."""
        from transformers.core_model_loading import revert_weight_conversion

        ignored = self.model._keys_to_ignore_on_save or ()
        kept = {name: tensor for name, tensor in state_dict.items() if name not in ignored}
        files: dict[str, Tensor] = revert_weight_conversion(self.model, kept)
        return files

    def save_config(self, folder: Path) -> None:
        """Write all files but the weights in Hugging Face form into an existing folder."""
        config = deepcopy(self.model.config)  # that of the model is read meanwhile
        config.dtype = str(self.dtype).removeprefix("torch.")
        config.architectures = [type(self.model).__name__]
        if self.model._auto_class is not None:  # set where the model's class came from a folder: its code is copied
            from transformers.dynamic_module_utils import custom_object_save

            custom_object_save(self.model, folder, config=config)
        config.save_pretrained(folder)
        if self.path is not None:
            copy_processor(self.path, folder)
        if self.model.can_generate():
            write_generation_config(self.model.generation_config, folder)

    def save_adapter(self, folder: Path, state_dict: dict[str, Tensor]) -> None:
        """Write the adapters in peft's form.

        Args:
            folder: Folder to write to.
            state_dict: Full tensors of `saved` by name.
        """
        assert self.lora is not None
        save_adapter(folder, self.model, self.lora, self.base, self.head, state_dict)

    def largest_layer(self, numel: Callable[[nn.Parameter], int]) -> int:
        """Elements of the largest layer, embedding or output layer.

        Args:
            numel: Elements of a whole parameter.
        """
        kinds = set(self.model._no_split_modules or ())  # by which transformers too knows what stays together
        layers = [{*module.parameters()} for module in self.modules() if type(module).__name__ in kinds]
        others = {*self.parameters()}.difference(*layers)
        return max(sum(map(numel, each)) for each in [*layers, *({parameter} for parameter in others)])

    @property
    @abstractmethod
    def decoder(self) -> Any:
        """The layers below the output layer."""

    def tower_parameters(self) -> list[nn.Parameter]:
        """The weights that read pictures: of the tower, and of the layers between it and the decoder."""
        others = {*self.decoder.parameters(), *self.output_layer.parameters()}
        return [parameter for parameter in self.parameters() if parameter not in others]

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor | None,
        max_seqlen: int,
        scored: Tensor,
        targets: Tensor,
        *readout: Any,
        routing: Routing | None = None,
        prefixes: Prefixes | None = None,
        pictures: PicturesRead | None = None,
    ) -> tuple[Tensor, ...]:
        """The values that the output layer computes for each scored token of a `ModelInput`, `[R, ...]` each.

        Args:
            input_ids: See `ModelInput`, also for the next five.
            position_ids: See there.
            cu_seqlens: See there.
            max_seqlen: See there.
            scored: See there.
            targets: See there.
            readout: More arguments of the output layer's forward.
            routing: The experts of this pass; None for those that the routers choose.
            prefixes: See `ModelInput`.
            pictures: See `ModelInput`.
        """
        states = self.decoder(
            **({"input_ids": input_ids} if pictures is None else self._with_pictures(input_ids, pictures)),
            position_ids=position_ids,
            use_cache=False,
            cu_seq_lens_q=cu_seqlens,
            cu_seq_lens_k=cu_seqlens if prefixes is None else prefixes.cu_seqlens,
            max_length_q=max_seqlen,
            max_length_k=max_seqlen if prefixes is None else prefixes.max_seqlen,
            divided=self.divided,
            prefixes=prefixes,
            **({ROW_NUMBERS: row_numbers(cu_seqlens)} if self.has_mixers and cu_seqlens is not None else {}),
            **({} if routing is None else {ROUTING: routing}),
        ).last_hidden_state  # [S, L, H]
        values: tuple[Tensor, ...] = self.output_layer(gather(states.flatten(0, 1), 0, scored), targets, *readout)
        return values

    def _with_pictures(self, input_ids: Tensor, pictures: PicturesRead) -> dict[str, Any]:
        """The decoder's input in place of ids: embeddings, with the features of pictures in their places.

        Transformers finds these places by the placeholder's id, which a policy may also sample. So they are given.
        """
        found: Any = self.model.base_model.get_image_features(**pictures.tensors, return_dict=True)
        embeddings = self.model.get_input_embeddings()(input_ids)  # [S, L, H]
        features = _chosen(found.pooler_output, pictures).to(embeddings.dtype)
        shown = embeddings.flatten(0, 1).index_copy(0, pictures.places, features).view_as(embeddings)
        if (layers := getattr(found, "deepstack_features", None)) is None:
            return {"inputs_embeds": shown}
        mask = torch.zeros_like(input_ids, dtype=torch.bool)
        mask.view(-1)[pictures.places] = True
        # Features of the tower's lower layers, which are added in the first layers (DeepStack, arXiv 2406.04334).
        deeper = [_chosen(layer, pictures) for layer in layers]
        return {"inputs_embeds": shown, "visual_pos_masks": mask, "deepstack_visual_embeds": deeper}


def _chosen(features: Any, pictures: PicturesRead) -> Tensor:
    """`[P, H]`, the features that the line reads, from a tensor or from tensors of each picture."""
    every = features.flatten(0, -2) if isinstance(features, Tensor) else torch.cat(list(features))
    return gather(every, 0, pictures.features)


def _attend(model: Any, how: str) -> None:
    """Let the decoder of a transformers model attend in one of transformers' ways; a tower keeps torch's."""
    has_tower = model.config.get_text_config() is not model.config
    model.set_attn_implementation({"text_config": how, "vision_config": "sdpa"} if has_tower else how)


def _from_pretrained(
    auto_class: str, path: Path, trust_remote_code: bool, **settings: Any
) -> tuple[Any, dict[str, Any]]:
    """A transformers model with eager attention, transformers' own reference, and the report on its weights."""
    import transformers
    from safetensors import SafetensorError

    with stored_code(path, "architecture", trust_remote_code):
        try:
            register_decoder(path, trust_remote_code)
            config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
            scalar = auto_class == SCALAR_AUTO_CLASS
            kind: Any = class_of(config, scalar) if reads_pictures(config) else getattr(transformers, auto_class)
            model, report = kind.from_pretrained(
                path,
                attn_implementation="eager",
                ignore_mismatched_sizes=True,  # which `_require_weights` says better
                output_loading_info=True,
                trust_remote_code=trust_remote_code,
                **settings,
            )
        except (OSError, RuntimeError, SafetensorError, ValueError) as error:
            raise UserError(
                f"`model` {str(path)!r} cannot be loaded ({str(error).splitlines()[0]}); check its files, or copy the"
                " model once more"
            ) from error
        except UnpicklingError as error:  # transformers reads files of pickles with `weights_only`
            raise UserError(
                f"`model` {str(path)!r} cannot be loaded: its weights are not safetensors, and unpickling them would do"
                " more than read tensors; take the model in safetensors"
            ) from error
    return model, report


def _require_weights(path: Path, report: dict[str, Any], may_lack: set[str]) -> None:
    """Refuse weights of other shapes or too few; transformers would fill these with random numbers."""
    if report["mismatched_keys"]:
        name, found, needed = min(report["mismatched_keys"])
        raise UserError(
            f"`model` {str(path)!r} cannot be loaded: {name!r} has the shape {list(found)} in its files, where"
            f" {list(needed)} is needed; give a model whose config.json fits its weights"
        )
    if missing := set(report["missing_keys"]) - may_lack:
        raise UserError(
            f"`model` {str(path)!r} lacks {len(missing)} weights, {min(missing)!r} the first of them; give a"
            " complete model"
        )


def _unknown(path: Path, model: nn.Module, names: Iterable[str]) -> str:
    unknown = [name for name in names if name.split(".")[0] not in OUTPUT_LAYERS]
    if not unknown:
        return ""
    return (
        f"`model` {str(path)!r} has {len(unknown)} tensors in its files that {type(model).__name__} does not know,"
        f" {min(unknown)!r} the first of them, and they are left out; check that config.json is of this model"
    )


def probe(vocabulary: int) -> TokenRows:
    """Three short rows of tokens from all over the vocabulary, two of them with one prompt."""
    tokens = torch.randint(vocabulary, (SHORTEST + 1 + 3 * 8,), generator=torch.Generator().manual_seed(0))
    prompt, other, responses = tokens.split([SHORTEST, 1, 3 * 8])
    lengths = torch.tensor([6, 8, 7])
    responses = responses.view(3, 8) * (torch.arange(8) < lengths[:, None])
    return TokenRows(Ragged.from_lists([prompt.tolist(), other.tolist(), prompt.tolist()]), responses, lengths)


CASTS = {Tensor.to, Tensor.type, Tensor.type_as, Tensor.bfloat16, Tensor.half}
NARROW = (torch.bfloat16, torch.float16)


class Float32Arithmetic(TorchFunctionMode):
    """A context in which a model of narrower weights computes in float32.

    The vectors of an embedding are widened after the lookup, and are not cast back. A weight is widened for each of its
    products, so no copy of the model is held.
    """

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        floats = [
            each for each in tree_leaves((arguments, keywords)) if isinstance(each, Tensor) and each.is_floating_point()
        ]
        changes = function.__name__.endswith("_") and function not in (Tensor.__matmul__, Tensor.__rmatmul__)
        if len({each.dtype for each in floats}) > 1 and not changes:
            arguments, keywords = tree_map(_widened, (arguments, keywords))
        result = function(*arguments, **keywords)
        if function is nn.functional.embedding:
            return _widened(result)
        if function in CASTS and result.dtype in NARROW and floats[0].dtype == torch.float32:
            return floats[0].to(result.device)
        return result


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in NARROW else value


def use_onednn(model: nn.Module) -> None:
    """Let the model's linear layers compute by oneDNN where they can; their parameters stay as they are."""
    if not torch.backends.mkldnn.is_available():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDNNLinear


class OneDNNLinear(nn.Linear):
    """`nn.Linear` computed by oneDNN in float32 on the CPU; the result is the same to float32's precision.

    Torch multiplies float32 matrices by MKL, which leaves AVX-512 unused on processors that are not Intel's: on a Zen 5
    core 110 GFLOP/s, where oneDNN, which torch ships for other dtypes, reaches 250."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Torch's `linear`, computed by oneDNN under the conditions of `OneDNNLinear`."""
    onednn = input.is_cpu and input.dtype == weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    if not onednn:
        return nn.functional.linear(input, weight, bias)
    apply: Any = _Linear.apply
    output: Tensor = apply(input.flatten(0, -2), weight, bias)
    return output.view(*input.shape[:-1], -1)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return _product(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        (grad,) = grads
        for_input, for_weight, for_bias = ctx.needs_input_grad
        return (
            _product(grad, weight.T) if for_input else None,
            _product(grad.T.contiguous(), input.T) if for_weight else None,  # oneDNN is slow where both sides are views
            grad.sum(0) if for_bias else None,
        )


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """`left @ right.T + bias`."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return product
