"""Low-rank adapters (LoRA, arXiv 2106.09685) by peft: add, turn off, save and merge. Only this file imports peft.

A layer computes `x W' + (alpha / rank) x A' B'` with its weight `W` `[out, in]` frozen, `A` `[rank, in]` and `B`
`[out, rank]`. `B` starts at zero, so a model with new adapters computes the same as without.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rlflow.errors import UserError, one_line, require
from rlflow.models.mixers import read_by_kernels
from rlflow.models.picture_processor import class_of, copy_processor, reads_pictures
from rlflow.models.remote_code import stored_code
from rlflow.models.sizes import experts
from rlflow.models.tiny import resolve_model
from rlflow.models.weight_files import write_generation_config
from rlflow.models.weights import ADAPTER, PARAMETER, is_adapter

PEFT_PREFIX = "base_model.model."
# Layers that peft takes for experts in mixtures of them, also in shared experts and in layers that have none.
EXPERT_LAYERS = {"gate_proj", "up_proj", "down_proj"}
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True)
class LoRA:
    """Train low-rank adapters of a model's linear layers; the model's own weights do not change.

    Attributes:
        rank: Rank of the adapters.
        alpha: The product of the adapters' factors is multiplied by `alpha / rank`.
        dropout: Share of a layer's inputs that its adapter does not see in training. It is drawn for each micro-batch,
            so the gradient then depends on how rows are split into micro-batches.
        targets: Layers that get adapters, by the last parts of their names. Or `all-linear` for all linear layers,
            except the output layer, `out_proj` of Mamba's mixers, and feed-forward layers of a mixture of experts.
            Layers of a vision tower never get adapters.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UserError(f"`lora.rank` is {self.rank}; give 1 or more")
        if not self.alpha > 0:
            raise UserError(f"`lora.alpha` is {self.alpha}; give more than 0, twice the rank say")
        if not 0 <= self.dropout < 1:
            raise UserError(f"`lora.dropout` is {self.dropout}; give a share from 0 to below 1")
        if not self.targets:
            raise UserError("`lora.targets` is empty; name layers such as `q_proj`, or give `all-linear`")


def require_peft() -> None:
    """Refuse adapters where peft is missing or cannot be imported, before weights are loaded.

    Raises:
        UserError: Peft is missing or cannot be imported.
    """
    require("peft", "`lora`", "lora")
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise UserError(f"`lora` needs peft, which cannot be imported ({one_line(error)}); reinstall it") from error


def add_adapters(model: Any, lora: LoRA, head: str | None) -> None:
    """Freeze a transformers model and give its layers adapters, the same on every rank and for every number of ranks.

    Args:
        model: Model to change in place. If it is on the device `meta`, so are the adapters, and `first_values` are
            written later.
        lora: Settings of the adapters.
        head: Name of an output layer that is trained as a whole; None for none.

    Raises:
        UserError: `lora.targets` names no layer, or a layer that is not linear.
    """
    from peft import inject_adapter_in_model
    from peft.tuners.lora import ParamWrapper

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    config = _peft_config(lora)
    read_past, mixture = read_by_kernels(model), experts(model.config.to_dict()) is not None
    if reads_pictures(model.config):
        config.target_modules = _of_decoder(model, lora.targets)
    elif lora.targets == "all-linear" and (read_past or mixture):
        # Peft's `all-linear` would include experts and routers, which are not linear layers.
        left_out = {head, *read_past}
        config.target_modules = [
            name
            for name, layer in model.named_modules()
            if isinstance(layer, nn.Linear)
            and name not in left_out
            and not (mixture and name.rpartition(".")[2] in EXPERT_LAYERS)
        ]
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        why = str(error).splitlines()[0].rstrip("(")  # peft prints a layer over several lines
        raise UserError(
            f"`lora.targets` is {lora.targets!r}, which peft refuses ({why}); name linear layers of the model, or give"
            " `all-linear`"
        ) from error
    for name, layer in adapted_layers(model):
        linear = isinstance(layer.get_base_layer(), nn.Linear)
        if not linear or isinstance(layer, ParamWrapper) or not {ADAPTER} <= layer.lora_A.keys():  # experts and routers
            raise UserError(f"`lora.targets` is {lora.targets!r}, and {name!r} is not a linear layer; name linear ones")
        if name in read_past:
            raise UserError(
                f"`lora.targets` is {lora.targets!r}, and a kernel for CUDA reads the weight of {name!r} without its"
                " adapter; name other layers, such as `in_proj`"
            )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name) and not parameter.is_meta:
                parameter.copy_(first_values(name, parameter.shape))
    if head is not None:
        getattr(model, head).requires_grad_(True)


def _of_decoder(model: Any, targets: Literal["all-linear"] | tuple[str, ...]) -> list[str]:
    """Names of the targets in the decoder of a model that reads pictures; peft would also take those in its tower.

    Raises:
        UserError: The decoder has no such layer.
    """
    decoder = {*model.get_decoder().modules()}
    found = [
        name
        for name, layer in model.named_modules()
        if layer in decoder
        and (
            isinstance(layer, nn.Linear)
            if targets == "all-linear"
            else name.endswith(tuple(f".{of}" for of in targets))
        )
    ]
    if not found:
        raise UserError(
            f"`lora.targets` is {targets!r}, and no layer of the decoder has such a name; name some that do"
        )
    return found


def first_values(name: str, shape: torch.Size) -> Tensor:
    """First values of a new adapter's parameter, on the CPU: drawn as peft does, but seeded by the run and the layer.

    Args:
        name: The parameter's name in its transformers model.
        shape: Shape of the whole parameter.
    """
    found = PARAMETER.search(name)
    assert found is not None, name
    if found[1] == "lora_B":
        return torch.zeros(shape)
    digest = hashlib.blake2b(f"{torch.initial_seed()}/{name[: found.start()]}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    return nn.init.kaiming_uniform_(torch.empty(shape), a=5**0.5, generator=generator)


def adapter_of(model: nn.Module) -> dict[str, Any]:
    """The peft layer of each adapted weight, by that parameter's name in `model`."""
    return {f"{name}.base_layer.weight": layer for name, layer in adapted_layers(model)}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """A context in which the model computes as without adapters."""
    layers = [layer for _, layer in adapted_layers(model)]
    for layer in layers:
        layer._disable_adapters = True  # peft's switch would also turn off gradients, on which DeepSpeed has hooks
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def save_adapter(
    folder: Path, model: nn.Module, lora: LoRA, base: str, head: str | None, state_dict: dict[str, Tensor]
) -> None:
    """Write an adapter in peft's form.

    Args:
        folder: Folder to write.
        model: Model that has the adapter.
        lora: Settings of the adapter.
        base: Model under the adapter: a folder, a Hugging Face name, or `tiny`.
        head: Name of an output layer that was trained as a whole; None for none.
        state_dict: Full trained tensors by `plain_name`.
    """
    from safetensors.torch import save_file

    config = _peft_config(lora)
    config.task_type = "CAUSAL_LM" if head is None else "SEQ_CLS"
    config.modules_to_save = None if head is None else [head]
    config.target_modules = sorted(name for name, _ in adapted_layers(model))
    config.base_model_name_or_path = str(Path(base).resolve()) if Path(base).is_dir() else base
    config.inference_mode = True
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    tensors = {PEFT_PREFIX + name: tensor.contiguous() for name, tensor in state_dict.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def merge(adapter: Path, folder: Path, scratch: Path, trust_remote_code: bool = False) -> Path:
    """Merge an adapter into its base model and write the result: added in float32 at least, then in the base's dtype.

    Args:
        adapter: A folder in peft's form; it names its base.
        folder: Folder to write.
        scratch: Folder for the embedded model `tiny`.
        trust_remote_code: Whether code in the base model's folder may run.

    Returns:
        Path of the base model.

    Raises:
        UserError: The adapter or its base cannot be read.
    """
    from peft import PeftConfig, PeftModel
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
    )

    try:
        config = PeftConfig.from_pretrained(str(adapter))
    except (OSError, TypeError, ValueError) as error:
        raise UserError(
            f"`--model` {str(adapter)!r}: {CONFIG} cannot be read ({one_line(error)}); correct it"
        ) from error
    base = resolve_model(str(config.base_model_name_or_path), scratch)
    scalar = config.task_type == "SEQ_CLS"
    kind: Any = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    settings = {"num_labels": 1} if scalar else {}
    try:
        with stored_code(
            base, "architecture", trust_remote_code, "the base of `--model`", "rlflow export --trust_remote_code"
        ):
            architecture = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
            kind = class_of(architecture, scalar) if (pictures := reads_pictures(architecture)) else kind
            model: Any = kind.from_pretrained(base, dtype="auto", trust_remote_code=trust_remote_code, **settings)
        dtype = model.dtype
        wide = torch.promote_types(dtype, torch.float32)
        merged: Any = PeftModel.from_pretrained(model.to(wide), str(adapter), autocast_adapter_dtype=False)
        merged = merged.merge_and_unload()
    except UserError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"`--model` {str(adapter)!r} on {str(base)!r} cannot be loaded: {reason}; if that is not the"
            f" model it was trained on, correct `base_model_name_or_path` in its {CONFIG}"
        ) from error
    generation = merged.generation_config if merged.can_generate() else None
    if generation is not None:  # which `save_pretrained` may refuse
        merged.generation_config = type(generation)()
    merged.to(dtype).save_pretrained(folder)
    if generation is not None:
        write_generation_config(generation, folder)
    if pictures:
        copy_processor(base, folder)
    return base


def _peft_config(lora: LoRA) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.targets if isinstance(lora.targets, str) else list(lora.targets),
    )


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The peft layers of a model with adapters, each around a linear layer, by name."""
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module
