"""Where vLLM holds each of the trainer's tensors, and what it computes with, read back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.rollout.manifest import Piece
from rlflow.rollout.vllm.experts import hf_name, is_experts, pieces_of_experts, read_experts, readable

UNITS = 256  # unit vectors multiplied at once when a packed weight is read back
SINKS = "sinks"  # of attention, GPT-OSS's


def without_sinks(weights: Iterator[tuple[str, Tensor]], sinks: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """All but attention sinks, which a reload leaves as they were; those are put into `sinks`."""
    for name, tensor in weights:
        if name.endswith(f".{SINKS}"):
            sinks[name] = tensor.clone()  # a bucket lasts until the next
        else:
            yield name, tensor


@torch.no_grad()
def set_sinks(model: Any, pieces: Iterable[Piece], sinks: dict[str, Tensor]) -> None:
    """Copy attention sinks to where the model holds them."""
    for piece in pieces:
        if piece.name in sinks:
            model.get_parameter(piece.place).copy_(piece.sent(sinks[piece.name]))


def pack_heads_again(model: Any) -> None:
    """Take over a reloaded embedding in the output layer that is tied to it.

    The CPU build computes with a packed copy of `lm_head`, and a reload refreshes only the copies of layers that were
    sent by name. On GPUs this does nothing.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def pieces_of(model: Any, model_type: str) -> Iterator[Piece]:
    """Where each of the engine's parameters comes from, parameter by parameter.

    Raises:
        UserError: A parameter is of a kind that is not read back.
    """
    from vllm.model_executor.layers.linear import RowParallelLinear

    fused: dict[str, list[str]] = model.packed_modules_mapping
    names: dict[int, str] = {}  # by the parameter's identity: a tied one goes by its first name in every place
    for path, module in model.named_modules():
        parent, _, leaf = path.rpartition(".")
        for kind, parameter in module.named_parameters(recurse=False):
            place = f"{path}.{kind}"
            _require_readable(module, parameter, place)
            if is_experts(module):
                continue
            called = [f"{parent}.{source}.{kind}".lstrip(".") for source in fused.get(leaf, [leaf])]
            sources = [hf_name(name, model_type) for name in called]
            sources[0] = names.setdefault(id(parameter), sources[0])
            if isinstance(module, RowParallelLinear) and kind == "weight":
                columns = module.input_size_per_partition
                yield Piece(sources[0], place, columns, dim=1, start=module.tp_rank * columns)
            else:
                yield from _rows(sources, place, _parts(module, parameter))
        if is_experts(module):
            yield from pieces_of_experts(module, path, model_type)


def _require_readable(module: Any, parameter: Tensor, place: str) -> None:
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

    if isinstance(module, LinearBase | VocabParallelEmbedding):
        can_read = isinstance(module.quant_method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)
    elif is_experts(module):
        can_read = readable(module)
    else:
        can_read = parameter.dim() == 1  # norms and attention sinks
    if not can_read:
        raise UserError(
            f"`{place}` is held by a {type(module).__name__}, whose weights VLLMEngine cannot read back to verify a "
            "sync; use a model without quantisation, or TransformersEngine"
        )


def _parts(module: Any, parameter: Tensor) -> list[tuple[int, int, int]]:
    """The tensors that the rows of a layer are made of: for each its rows in all, the first one here, the rows here."""
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
    if parameter is getattr(module, SINKS, None):  # of the heads that are here
        of_rank = len(parameter)
        return [(of_rank * get_tensor_model_parallel_world_size(), of_rank * get_tensor_model_parallel_rank(), of_rank)]
    rows = module.output_size if isinstance(module, LinearBase) else len(parameter)
    return [(rows, 0, rows)]


def _rows(sources: list[str], place: str, parts: list[tuple[int, int, int]]) -> Iterator[Piece]:
    """One piece for each part. The trainer has a tensor for each, or all of them in one."""
    assert len(sources) in (1, len(parts)), (sources, place)
    row = before = 0
    for index, (size, start, length) in enumerate(parts):
        name = sources[index] if len(sources) > 1 else sources[0]
        yield Piece(name, place, length, start=start + before, row=row)
        row += length
        before += size if len(sources) == 1 else 0


def read_back(model: Any, place: str, dtype: torch.dtype, model_type: str, wide_head: bool = False) -> Tensor:
    """The parameter that the engine computes with, of experts in the trainer's layout.

    An output layer in a wider dtype than the model's, `wide_head`, computes with the parameter and not with its packed
    copy.
    """
    from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    path, _, kind = place.rpartition(".")
    module = model.get_submodule(path)
    if is_experts(module):
        return read_experts(module, kind, model_type)
    parameter: Tensor = module.get_parameter(kind)
    if kind != "weight" or not parameter.is_cpu:
        return parameter
    # The CPU build computes with packed copies, and keeps the parameters empty or unused.
    if isinstance(module, ParallelLMHead):
        return parameter if wide_head else _unpacked(module, module.embedding_dim, dtype)
    if isinstance(module, RowParallelLinear):
        return _unpacked(module, module.input_size_per_partition, dtype)
    if isinstance(module, LinearBase):
        return _unpacked(module, module.input_size, dtype)
    return parameter


def _unpacked(layer: Any, columns: int, dtype: torch.dtype) -> Tensor:
    """The weight `[rows, columns]` that a layer multiplies with: its products with the unit vectors.

    They are exact, for each is a sum with one term that is not 0.
    """
    units = torch.split(torch.eye(columns, dtype=dtype), UNITS)
    return torch.cat([layer.quant_method.apply(layer, some) for some in units]).T
