"""Names, slices and values of weights in vLLM: where each tensor of the trainer is, and how it is read back.

vLLM holds the tensors otherwise than transformers. It joins some in one parameter (`q_proj`, `k_proj` and `v_proj` in
`qkv_proj`), divides them among ranks, and on the CPU computes with packed copies. A sync uses `as_loaded` to rename
what is sent, `pack_again` and `pack_heads_again` to renew packed copies, and `pieces_of` with `read_back` to verify it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlflow.errors import UserError
from rlflow.models.moe import ROUTER_BIAS
from rlflow.models.sizes import experts
from rlflow.rollout.engine import Piece

if TYPE_CHECKING:
    from transformers import PretrainedConfig


UNITS = 256  # unit vectors multiplied together when a packed weight is read back
SINKS = "sinks"  # of attention, GPT-OSS's
UNPACKED = "_cpu_unpacked_conv_weight"  # vLLM's copy of a convolution that it has packed
DECAY = "A"  # of Mamba's layers: -exp of the trainer's A_log, in float32


@torch.no_grad()
def write(
    weights: Iterable[tuple[str, Tensor]], pieces: Iterable[Piece], parameter_of: Callable[[str], Tensor]
) -> None:
    """Copy each tensor's slices to where the engine computes with them, and make the rest of the parameters 0.

    It copies where vLLM's loader calls a function twice for each expert. The rest is padding, and on all ranks but the
    first a bias that ranks add once.

    Args:
        weights: The trainer's tensors in the engine's dtype; each is read before the next is taken.
        pieces: All pieces that the engine holds.
        parameter_of: Returns the parameter at a piece's place, or a view of it in the trainer's layout.
    """
    by_name: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_name.setdefault(piece.name, []).append(piece)
        parameter_of(piece.place).zero_()
    for name, tensor in weights:
        for piece in by_name[name]:
            piece.held(parameter_of(piece.place)).copy_(piece.sent(tensor))


def without_sinks(weights: Iterator[tuple[str, Tensor]], sinks: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Pass on all weights but attention sinks, which vLLM's reload does not change; `sinks` receives a copy of them."""
    for name, tensor in weights:
        if name.endswith(f".{SINKS}"):
            sinks[name] = tensor.clone()  # a bucket lasts until the next
        else:
            yield name, tensor


@torch.no_grad()
def set_sinks(model: Any, pieces: Iterable[Piece], sinks: dict[str, Tensor]) -> None:
    """Copy this rank's slice of each attention sink into vLLM's model, after a reload."""
    for piece in pieces:
        if piece.name in sinks:
            model.get_parameter(piece.place).copy_(piece.sent(sinks[piece.name]))


def pack_heads_again(model: Any) -> None:
    """Pack the output layer's weight again after a reload, since it may be tied to a reloaded embedding.

    The CPU build computes with a packed copy of `lm_head`, and a reload refreshes only the copies of layers that were
    sent by name. On GPUs this does nothing.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def renew_convolutions(model: Any) -> None:
    """Let Mamba's layers compute with the convolutions of a reload, where the CPU build has packed them for others.

    In bfloat16 it packs each convolution, for its kernel of the delta rule. Mamba's layers compute with a view of the
    parameter as it was before. Elsewhere this does nothing.
    """
    for module in model.modules():
        if hasattr(module, "conv_weights") and hasattr(module.conv1d, UNPACKED):
            module.conv_weights = getattr(module.conv1d, UNPACKED)


def pieces_of(model: Any, model_type: str, reads_pictures: bool = False) -> Iterator[Piece]:
    """The pieces of all parameters of this rank's part of the model, see `Piece`, those of a parameter in sequence.

    Args:
        model: vLLM's model, after its construction.
        model_type: Type of the model's text part in transformers, such as `qwen3`.
        reads_pictures: Whether it has a tower in addition to its text part, so that names begin otherwise.

    Raises:
        UserError: A layer holds a parameter in a form that cannot be read back, such as quantised.
    """
    from vllm.model_executor.layers.linear import RowParallelLinear

    fused: dict[str, list[str]] = model.packed_modules_mapping | WHOLE.get(model_type, {})
    beginnings = _beginnings(model) if reads_pictures else {}
    names: dict[int, str] = {}  # by the parameter's identity: a tied one goes by its first name in every place
    for path, module in model.named_modules():
        parent, _, leaf = path.rpartition(".")
        for kind, parameter in module.named_parameters(recurse=False):
            place = f"{path}.{kind}"
            _require_readable(module, parameter, place)
            if is_experts(module):
                continue
            called = [f"{parent}.{source}.{kind}".lstrip(".") for source in fused.get(leaf, [leaf])]
            sources = [_begun(hf_name(name, model_type), beginnings) for name in called]
            sources[0] = names.setdefault(id(parameter), sources[0])
            if isinstance(module, RowParallelLinear) and kind == "weight":
                columns = module.input_size_per_partition
                yield Piece(sources[0], place, columns, dim=1, start=module.tp_rank * columns)
            else:
                yield from _rows(sources, place, _parts(module, parameter))
        if is_experts(module):
            yield from pieces_of_experts(module, path, model_type)


def _beginnings(model: Any) -> dict[str, str]:
    """Beginnings of names in vLLM, longest first, and those of transformers for them: vLLM's own mapping, reversed.

    Where it lists several, the first is that of transformers' models; others are of older files.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    found: dict[str, str] = {}
    for ours, theirs in {} if mapper is None else mapper.orig_to_new_prefix.items():
        if theirs is not None:
            found.setdefault(theirs, ours)
    return dict(sorted(found.items(), key=lambda each: -len(each[0])))


def _begun(name: str, beginnings: Mapping[str, str]) -> str:
    """`_begun("visual.merger.norm.weight", {"visual.": "model.visual."})` is `model.visual.merger.norm.weight`."""
    theirs = next(filter(name.startswith, beginnings), "")
    return beginnings[theirs] + name.removeprefix(theirs) if theirs else name


def _require_readable(module: Any, parameter: Tensor, place: str) -> None:
    from vllm.model_executor.layers.conv import ConvLayerBase
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

    if isinstance(module, LinearBase | VocabParallelEmbedding):
        can_read = isinstance(module.quant_method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)
    elif is_experts(module):
        can_read = readable(module)
    else:
        held_plain = nn.Embedding | nn.Conv2d | nn.Conv3d | ConvLayerBase  # of towers
        can_read = parameter.dim() == 1 or isinstance(module, held_plain)  # norms and attention sinks are of one
    if not can_read:
        raise UserError(
            f"`{place}` is held by a {type(module).__name__}, whose weights VLLMEngine cannot read back to verify a "
            "sync; use a model without quantisation, or TransformersEngine"
        )


def _parts(module: Any, parameter: Tensor) -> list[tuple[int, int, int]]:
    """For each tensor in the rows of a layer: how many rows it has, its first row on this rank, its rows on this rank.

    On the second of two ranks, 8 heads of queries and 2 of keys and values, of the size 16, give
    `[(128, 64, 64), (32, 16, 16), (32, 16, 16)]`.
    """
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        LinearBase,
        MergedColumnParallelLinear,
        QKVParallelLinear,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(module, VocabParallelEmbedding):  # padded behind the vocabulary
        start, stop = module.shard_indices.org_vocab_start_index, module.shard_indices.org_vocab_end_index
        return [(module.org_vocab_size, start, stop - start)]
    if isinstance(module, QKVParallelLinear):
        kv_rank = module.tp_rank // module.num_kv_head_replicas
        heads = (
            (module.total_num_heads, module.tp_rank, module.num_heads, module.head_size),
            (module.total_num_kv_heads, kv_rank, module.num_kv_heads, module.head_size),
            (module.total_num_kv_heads, kv_rank, module.num_kv_heads, module.v_head_size),
        )
        return [(total * size, rank * here * size, here * size) for total, rank, here, size in heads]
    if isinstance(module, ColumnParallelLinear):
        sizes = module.output_sizes if isinstance(module, MergedColumnParallelLinear) else [module.output_size]
        here = [size // module.tp_size for size in sizes]
        return [(size, module.tp_rank * rows, rows) for size, rows in zip(sizes, here, strict=True)]
    if parameter is getattr(module, SINKS, None):  # of the heads on this rank
        of_rank = len(parameter)
        return [(of_rank * get_tensor_model_parallel_world_size(), of_rank * get_tensor_model_parallel_rank(), of_rank)]
    rows = module.output_size if isinstance(module, LinearBase) else len(parameter)
    return [(rows, 0, rows)]


def _rows(sources: list[str], place: str, parts: list[tuple[int, int, int]]) -> Iterator[Piece]:
    """One piece for each part of a parameter; `sources` names each part's tensor, the first has what are more parts.

    The parts q, k, v, z of the sources `in_proj_qkv` and `in_proj_z` are three of the first and one of the second.
    """
    several = len(parts) - len(sources)  # the first tensor has so many parts more than one
    assert several >= 0, (sources, place)
    row = before = 0
    for index, (size, start, length) in enumerate(parts):
        name = sources[max(0, index - several)]
        decays = place.endswith(f".{DECAY}")
        yield Piece(name, place, length, start=start + before, row=row, decays=decays)
        row += length
        before = before + size if index < several else 0


def read_back(model: Any, place: str, model_type: str, wide_head: bool = False) -> Tensor:
    """The weight that the engine computes with at a parameter, unpacked; for experts, in the trainer's layout.

    Args:
        model: vLLM's model.
        place: vLLM's name of the parameter, such as `model.layers.0.self_attn.qkv_proj.weight`.
        model_type: Type of the model in transformers.
        wide_head: Whether logits are computed in a wider dtype than the engine's; then the output layer computes with
            its parameter and not with a packed copy.
    """
    from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    path, _, kind = place.rpartition(".")
    module = model.get_submodule(path)
    if is_experts(module):
        return read_experts(module, kind, model_type)
    parameter: Tensor = module.get_parameter(kind)
    if path.endswith(".conv1d") and kind == "weight":
        return _convolution(model.get_submodule(path.removesuffix(".conv1d")))
    if kind != "weight" or not parameter.is_cpu:
        return parameter
    # The CPU build computes with packed copies, and keeps the parameters empty or unused.
    if isinstance(module, ParallelLMHead):
        return parameter if wide_head else _unpacked(module, module.embedding_dim, parameter.dtype)
    if isinstance(module, RowParallelLinear):
        return _unpacked(module, module.input_size_per_partition, parameter.dtype)
    if isinstance(module, LinearBase):
        return _unpacked(module, module.input_size, parameter.dtype)
    return parameter


def _convolution(mixer: Any) -> Tensor:
    """The weight `[channels, 1, width]` that the convolution of a mixer computes with."""
    weight: Tensor = mixer.conv1d.weight
    if hasattr(mixer, "conv_weights"):  # Mamba's layers compute with a view
        weight = mixer.conv_weights
    elif hasattr(mixer.conv1d, UNPACKED):  # the delta rule's with what is packed
        (weight,) = _in_order(weight[None], None)
    return weight.view(len(weight), 1, -1)


def _unpacked(layer: Any, columns: int, dtype: torch.dtype) -> Tensor:
    """The weight `[rows, columns]` that a layer multiplies with, from its products with the unit vectors.

    The products are exact, since each is a sum in which at most one term is not 0.
    """
    units = torch.split(torch.eye(columns, dtype=dtype), UNITS)
    return torch.cat([layer.quant_method.apply(layer, some) for some in units]).T


CPU_MULTIPLE = 32  # vLLM's kernel on the CPU pads other sizes of experts, and padding is not read back
DIGIT = 256  # whole numbers below are exact in bfloat16

# Parts of names in vLLM, and in transformers, by type of model.
NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "falcon_h1": {".mamba.mamba.": ".mamba."},
        "gpt_oss": {".attn.": ".self_attn.", "model.embedding.": "model.embed_tokens."},
        "granitemoehybrid": {".block_sparse_moe.gate.": ".block_sparse_moe.router."},
        "mixtral": {".block_sparse_moe.": ".mlp."},
        "nemotron_h": {"model.embed_tokens.": "model.embeddings."},
    }
)
# Layers that transformers has in one tensor too, where vLLM lists several.
WHOLE: Mapping[str, dict[str, list[str]]] = MappingProxyType({"glm4": {"gate_up_proj": ["gate_up_proj"]}})
# Parts of the trainer's names for which vLLM's reload takes others, in this order.
RELOADED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "granitemoehybrid": {
            ".router.": ".router.layer.",
            ".experts.gate_up_proj": ".input_linear.weight",
            ".experts.down_proj": ".output_linear.weight",
        },
        "mixtral": {
            ".mlp.": ".block_sparse_moe.",
            ".experts.gate_up_proj": ".experts.w13",
            ".experts.down_proj": ".experts.w2",
        },
    }
)
# The setting that says the size of an expert, by the types of models whose experts are read back.
EXPERT_SIZES = {
    "glm4_moe": "moe_intermediate_size",
    "gpt_oss": "intermediate_size",
    "granitemoehybrid": "intermediate_size",
    "mixtral": "intermediate_size",
    "qwen3_5_moe_text": "moe_intermediate_size",
    "qwen3_moe": "moe_intermediate_size",
    "qwen3_next": "moe_intermediate_size",
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
    """Reason why `VLLMEngine` refuses a mixture of experts, as in `unserved`; None if it takes the model.

    It is None also if the model is not a mixture.

    Args:
        config: The transformers configuration of the model's text part.
        tensor_parallel_size: Ranks that divide each expert.
        on_cpu: Whether vLLM's build is for the CPU.
    """
    found = experts(config.to_dict())
    dense = config.model_type == "nemotron_h" and "moe" not in config.layer_types  # it says how many it would have
    if found is None or dense:
        return None
    if config.model_type not in EXPERT_SIZES:
        return f"is a mixture of experts ({found[0]} {found[1]}), whose weights it cannot read back to verify a sync"
    if config.model_type == "gpt_oss":
        layers = getattr(config, "layer_types", None) or ()
        if any((kind == "sliding_attention") != (layer % 2 == 0) for layer, kind in enumerate(layers)):
            return "has other `layer_types` than sliding and full attention in turn, which is all that vLLM knows of it"
    size = getattr(config, EXPERT_SIZES[config.model_type])
    if size % tensor_parallel_size:
        return f"has experts of the size {size}, which {tensor_parallel_size} ranks do not divide"
    for name, width in (("hidden size", config.hidden_size), ("size on each rank", size // tensor_parallel_size)):
        if on_cpu and width % CPU_MULTIPLE:
            return (
                f"has experts whose {name} is {width}; on the CPU vLLM pads what is not a multiple of {CPU_MULTIPLE},"
                " and cannot read it back to verify a sync"
            )
    return None


def hf_name(name: str, model_type: str) -> str:
    """The trainer's name of a parameter that vLLM calls `name`; experts are named by `pieces_of_experts`.

    `hf_name("model.layers.0.attn.q_proj.bias", "gpt_oss")` is `model.layers.0.self_attn.q_proj.bias`.
    """
    for theirs, ours in NAMES.get(model_type, {}).items():
        name = name.replace(theirs, ours)
    return f"{name}_log" if name.endswith(f".{DECAY}") else name


def as_loaded(weights: Iterator[tuple[str, Tensor]], model_type: str) -> Iterator[tuple[str, Tensor]]:
    """Convert the trainer's names and tensors to those that vLLM accepts in a reload; tensors are views.

    Of `model.layers.0.mlp.experts.down_proj` of 8 experts, Mixtral's becomes
    `model.layers.0.block_sparse_moe.experts.w2`. GPT-OSS's, which vLLM reloads one expert at a time, becomes
    `model.layers.0.mlp.experts.0.down_proj` to `model.layers.0.mlp.experts.7.down_proj`.
    """
    for name, tensor in weights:
        before, inside, kind = name.partition(".mlp.experts.")
        if model_type == "gpt_oss" and inside:
            yield from ((f"{before}{inside}{number}.{kind}", expert) for number, expert in enumerate(tensor))
        else:
            for ours, theirs in RELOADED.get(model_type, {}).items():
                name = name.replace(ours, theirs)
            yield name, tensor


def is_experts(module: Any) -> bool:
    """Whether a module is vLLM's layer of experts."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    return isinstance(module, RoutedExperts)


def readable(module: Any) -> bool:
    """Whether the weights of a layer of experts can be read back: its kernel stores them in a known layout."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    if not isinstance(module.quant_method, UnquantizedFusedMoEMethod) or module.use_ep:
        return False
    backend = module.quant_method.unquantized_backend
    if backend is UnquantizedMoeBackend.CPU:
        return not _kernel(module)._use_zentorch
    return backend in (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)  # as they were loaded


def pack_again(model: Any) -> None:
    """Pack experts again after a reload, since the CPU build packs them only once; on GPUs this does nothing."""
    for module in model.modules():
        if is_experts(module) and module.w13_weight.is_cpu:
            _kernel(module).process_weights_after_loading(module)


def pieces_of_experts(module: Any, path: str, model_type: str) -> Iterator[Piece]:
    """The pieces of vLLM's layer of experts at `path`.

    `read_back` gives its parameters in the trainer's layout, so that a piece is a slice of one dimension of both.
    """
    parallel = module.moe_config.moe_parallel_config
    size, rank = parallel.tp_size, parallel.tp_rank
    before = hf_name(path, model_type).removesuffix(".routed_experts")
    names = TRANSPOSED if model_type == "gpt_oss" else STACKED
    for kind, parameter in module.named_parameters(recurse=False):
        if kind == ROUTER_BIAS:
            yield Piece(f"{before.removesuffix('.experts')}.gate.{kind}", f"{path}.{kind}", len(parameter))
            continue
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
    """The weights with which the kernel computes at an experts' parameter (`w13_weight`), in the trainer's layout."""
    parameter: Tensor = module.get_parameter(kind)
    if parameter.is_cpu and parameter.dim() == 3:
        parameter = _in_order(parameter, _kernel(module).isa)
    return in_trainers_layout(parameter, kind, model_type)


def in_trainers_layout(parameter: Tensor, kind: str, model_type: str) -> Tensor:
    """A view of vLLM's parameter `[E, out, in]` in transformers' layout, which is `[E, in, out]` for GPT-OSS."""
    return parameter.transpose(1, 2) if model_type == "gpt_oss" and parameter.dim() == 3 else parameter


def _kernel(module: Any) -> Any:
    return module.quant_method.moe_kernel.fused_experts


def _in_order(packed: Tensor, isa: str | None) -> Tensor:
    """The weights `[E, N, K]` that the CPU build has packed for its kernel; `isa` is None for a convolution."""
    order = _order(packed.shape[1], packed.shape[2], packed.dtype, isa)
    plain = torch.empty_like(packed).flatten(1)
    plain[:, order] = packed.flatten(1)
    return plain.view(packed.shape)


@lru_cache(maxsize=4)
def _order(rows: int, columns: int, dtype: torch.dtype, isa: str | None) -> Tensor:
    """`[N * K]` int64, for each element of a packed weight its index in the flattened plain weight.

    Found by packing the indices themselves as if they were weights, one digit to the base 256 at a time, so that each
    number is exact in every dtype.
    """
    from vllm._custom_ops import causal_conv1d_weight_pack, cpu_prepack_moe_weight

    places = torch.arange(rows * columns)
    order, unit = torch.zeros_like(places), 1
    while unit < len(places):
        digits = (places // unit % DIGIT).to(dtype).view(rows, columns)
        packed = causal_conv1d_weight_pack(digits) if isa is None else cpu_prepack_moe_weight(digits[None], isa)
        order += unit * packed.flatten().long()
        unit *= DIGIT
    assert torch.equal(order.sort().values, places), "packing is more than another order"
    return order
