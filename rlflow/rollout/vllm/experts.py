"""Mixtures of experts in vLLM: what their weights are called there, how they are sent, and what is held, read back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlflow.models.sizes import experts
from rlflow.rollout.manifest import Piece

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CPU_MULTIPLE = 32  # vLLM's kernel on the CPU pads other sizes of experts, and padding is not read back
DIGIT = 256  # whole numbers below are exact in bfloat16

# Types of models whose experts are read back: parts of names in vLLM, and in transformers.
SERVED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "qwen3_moe": {},
        "mixtral": {".block_sparse_moe.": ".mlp."},
        "gpt_oss": {".attn.": ".self_attn.", "model.embedding.": "model.embed_tokens."},
    }
)
# What vLLM's reload takes of Mixtral under other names than the trainer's, in this order.
MIXTRAL = {
    ".mlp.": ".block_sparse_moe.",
    ".experts.gate_up_proj": ".experts.w13",
    ".experts.down_proj": ".experts.w2",
}
# What the trainer calls the parts of vLLM's experts, and along which dimension ranks divide them.
STACKED = {"w13_weight": ("gate_up_proj", 1), "w2_weight": ("down_proj", 2)}  # [E, out, in]
TRANSPOSED = {  # GPT-OSS's: [E, in, out], gate and up alternate
    "w13_weight": ("gate_up_proj", 2),
    "w13_bias": ("gate_up_proj_bias", 1),
    "w2_weight": ("down_proj", 1),
    "w2_bias": ("down_proj_bias", 0),
}


def unserved_experts(config: PretrainedConfig, tensor_parallel_size: int, on_cpu: bool) -> str | None:
    """Why vLLM cannot generate with a mixture of experts so that each sync is verified; None where it can.

    Args:
        config: The model's transformers configuration, of its text.
        tensor_parallel_size: Ranks that divide each expert.
        on_cpu: Whether vLLM's build is for the CPU.
    """
    found = experts(config.to_dict())
    if found is None:
        return None
    if config.model_type not in SERVED:
        return f"is a mixture of experts ({found[0]} {found[1]}), whose weights it cannot read back to verify a sync"
    if config.model_type == "gpt_oss":
        layers = getattr(config, "layer_types", None) or ()
        if any((kind == "sliding_attention") != (layer % 2 == 0) for layer, kind in enumerate(layers)):
            return "has other `layer_types` than sliding and full attention in turn, which is all that vLLM knows of it"
    size = config.intermediate_size if config.model_type != "qwen3_moe" else config.moe_intermediate_size
    if size % tensor_parallel_size:
        return f"has experts of the size {size}, which {tensor_parallel_size} ranks do not divide"
    for name, width in (("hidden size", config.hidden_size), ("size on each rank", size // tensor_parallel_size)):
        if on_cpu and width % CPU_MULTIPLE:
            return (
                f"has experts whose {name} is {width}; on the CPU vLLM pads what is no multiple of {CPU_MULTIPLE}, and"
                " cannot read it back to verify a sync"
            )
    return None


def hf_name(name: str, model_type: str) -> str:
    """The trainer's name of what vLLM calls `name`, but for experts."""
    for theirs, ours in SERVED.get(model_type, {}).items():
        name = name.replace(theirs, ours)
    return name


def as_loaded(weights: Iterator[tuple[str, Tensor]], model_type: str) -> Iterator[tuple[str, Tensor]]:
    """The trainer's tensors under the names, and in the parts, that vLLM takes in a reload.

    What is sent of experts are views; vLLM loads GPT-OSS's anew only one expert at a time.
    """
    for name, tensor in weights:
        before, inside, kind = name.partition(".mlp.experts.")
        if model_type == "gpt_oss" and inside:
            yield from ((f"{before}{inside}{number}.{kind}", expert) for number, expert in enumerate(tensor))
        elif model_type == "mixtral":
            for ours, theirs in MIXTRAL.items():
                name = name.replace(ours, theirs)
            yield name, tensor
        else:
            yield name, tensor


def is_experts(module: Any) -> bool:
    """Whether it is vLLM's layer of a model's experts."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    return isinstance(module, RoutedExperts)


def readable(module: Any) -> bool:
    """Whether it is known how the kernel that computes with these experts holds them."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    if not isinstance(module.quant_method, UnquantizedFusedMoEMethod) or module.use_ep:
        return False
    backend = module.quant_method.unquantized_backend
    if backend is UnquantizedMoeBackend.CPU:
        return not _kernel(module)._use_zentorch
    return backend in (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)  # as they were loaded


def pack_again(model: Any) -> None:
    """Let the CPU build's kernels take over reloaded experts, whose packed copies vLLM makes only once."""
    for module in model.modules():
        if is_experts(module) and module.w13_weight.is_cpu:
            _kernel(module).process_weights_after_loading(module)


def pieces_of_experts(module: Any, path: str, model_type: str) -> Iterator[Piece]:
    """Where the parameters of vLLM's experts at `path` come from.

    `held` gives them in the trainer's layout, so that a piece is cut along one dimension of both.
    """
    parallel = module.moe_config.moe_parallel_config
    size, rank = parallel.tp_size, parallel.tp_rank
    before = hf_name(path, model_type).removesuffix(".routed_experts")
    names = TRANSPOSED if model_type == "gpt_oss" else STACKED
    for kind, parameter in module.named_parameters(recurse=False):
        ours, dim = names[kind]
        name, place = f"{before}.{ours}", f"{path}.{kind}"
        if kind == "w2_bias":  # added once, by the first rank
            yield Piece(name, place, parameter.shape[0] if rank == 0 else 0)
            continue
        here = in_trainers_layout(parameter, kind, model_type).shape[dim]
        if kind == "w13_weight" and model_type != "gpt_oss":  # all gates, then all ups
            half = here // 2
            for part in range(2):
                start = (part * size + rank) * half
                yield Piece(name, place, half, dim=dim, start=start, row=part * half)
        else:
            yield Piece(name, place, here, dim=dim, start=rank * here)


def read_experts(module: Any, kind: str, model_type: str) -> Tensor:
    """What the kernel computes with, in the trainer's layout."""
    parameter: Tensor = module.get_parameter(kind)
    if parameter.is_cpu and parameter.dim() == 3:
        parameter = _unpacked(parameter, _kernel(module).isa)
    return in_trainers_layout(parameter, kind, model_type)


def in_trainers_layout(parameter: Tensor, kind: str, model_type: str) -> Tensor:
    """A view of vLLM's parameter as transformers has it."""
    return parameter.transpose(1, 2) if model_type == "gpt_oss" and parameter.dim() == 3 else parameter


def _kernel(module: Any) -> Any:
    return module.quant_method.moe_kernel.fused_experts


def _unpacked(packed: Tensor, isa: str) -> Tensor:
    """`[E, N, K]`, of experts that the CPU build has packed for its kernel."""
    order = _order(packed.shape[1], packed.shape[2], packed.dtype, isa)
    plain = torch.empty_like(packed).flatten(1)
    plain[:, order] = packed.flatten(1)
    return plain.view(packed.shape)


@lru_cache(maxsize=4)
def _order(rows: int, columns: int, dtype: torch.dtype, isa: str) -> Tensor:
    """`[N * K]`, the place in a plain weight of each element of a packed one.

    Found by packing the places themselves, a digit at a time, so that each number is exact in every dtype.
    """
    from vllm._custom_ops import cpu_prepack_moe_weight

    places = torch.arange(rows * columns)
    order, unit = torch.zeros_like(places), 1
    while unit < len(places):
        digits = (places // unit % DIGIT).to(dtype).view(1, rows, columns)
        order += unit * cpu_prepack_moe_weight(digits, isa).flatten().long()
        unit *= DIGIT
    assert torch.equal(order.sort().values, places), "packing is more than another order"
    return order
