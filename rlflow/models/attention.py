"""Causal attention over packed sequences, under a name that transformers models can be loaded with.

A mask over the whole line would grow with the square of its length. Here each sequence attends to itself alone, so a
packed line costs what its sequences cost. Transformers makes no mask, since no function for masks is registered under
this name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from rlflow.errors import UserError
from rlflow.models.block_attention import block_attention
from rlflow.models.mixers import has_states
from rlflow.models.prefixes import Prefixes, gather
from rlflow.values.host_copy import on_host

PACKED_ATTENTION = "rlflow_packed"
BLOCK = 128  # tokens of a block of flex attention's mask
# On the CPU in bfloat16, rows of a line of at most so many tokens on average are computed in common blocks: that took
# 0.2 of the time at 12 tokens, 0.8 at 64, and 1.07 at 96.
SHORT = 64
Attention = Callable[..., tuple[Tensor, None]]


def heads_of(config: Any) -> tuple[int, int]:
    """Numbers of attention heads in a transformers configuration: those of queries, and those of keys and values."""
    text = config.get_text_config()
    count: int = text.num_attention_heads
    return count, getattr(text, "num_key_value_heads", None) or count


def check_sequence_parallel(
    config: Any, size: int, role: str, packing: bool = True, tensor_parallel_size: int = 1
) -> None:
    """Refuse a sequence-parallel size that does not fit a model's attention heads.

    Args:
        config: The model's transformers configuration.
        size: Number of ranks that divide each sequence of the role.
        role: Name of the role, for the error.
        packing: Whether forward passes are without padding.
        tensor_parallel_size: Number of ranks that divide the heads of a layer before.

    Raises:
        UserError: The heads cannot be divided among `size` ranks, layers carry a state, or forward passes are padded.
    """
    if size == 1:
        return
    if not packing:
        raise UserError(
            f"`strategy.packing` is off, and {size} ranks divide the sequences of `{role}`, which are packed for it;"
            " turn it on, or divide none"
        )
    if config.get_text_config() is not config:
        raise UserError(
            f"{size} ranks divide the sequences of `{role}`, and its model, of the type {config.model_type!r}, reads"
            " images, whose features no rank would have whole; set `sequence_parallel_size` of its placement to 1"
        )
    if has_states(config):
        raise UserError(
            f"{size} ranks divide the sequences of `{role}`, and layers of its model, of the type"
            f" {config.model_type!r}, carry a state from token to token, which no rank would have whole; set"
            " `sequence_parallel_size` of its placement to 1"
        )
    count, shared = (heads // tensor_parallel_size for heads in heads_of(config))
    # Each rank attends with its share of the query heads. If there are fewer heads of keys, ranks share these.
    legal = [fit for fit in range(1, count + 1) if count % fit == 0 and (shared % fit == 0 or fit % shared == 0)]
    if size not in legal:
        each = "" if tensor_parallel_size == 1 else f" on each of {tensor_parallel_size} ranks of a layer"
        raise UserError(
            f"the sequence-parallel size of `{role}` is {size}, and its model has {count} attention heads and"
            f" {shared} of keys and values{each}, which {size} ranks cannot divide; use one of"
            f" {', '.join(map(str, legal))}"
        )


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    divided: Attention | None = None,
    share: int = 0,
    prefixes: Prefixes | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence; transformers calls it in every layer. Dropout is never applied.

    Args:
        module: The attention layer.
        query: `[S, heads, L, head_dim]`.
        key: `[S, kv_heads, L, head_dim]`.
        value: Shaped as `key`.
        attention_mask: None; nothing makes a mask.
        scaling: Factor on the scores; None for `head_dim ** -0.5`.
        cu_seq_lens_q: `[sequences + 1]` int32, where the sequences start if there is one line; None if each line is a
            sequence.
        max_length_q: Length of the longest sequence of the line.
        sliding_window: Number of the last tokens that a token sees, itself included; None for all.
        softcap: Bound of the scores: a score s becomes `softcap * tanh(s / softcap)`; None for no bound.
        s_aux: `[all heads]`, attention sinks: the score of a token that every token sees and that has no value.
        divided: If ranks divide the line among them, the function that gathers the line, calls this function and
            divides the result; else None.
        share: If ranks divide the heads among them, the number of this rank's part; the part's sinks are used.
        prefixes: Keys that each row sees, if rows share tokens of the line; else None.
        others: Further arguments that transformers passes.
    """
    assert attention_mask is None
    if divided is not None:
        others |= {"scaling": scaling, "cu_seq_lens_q": cu_seq_lens_q, "max_length_q": max_length_q}
        others |= {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux, "prefixes": prefixes}
        return divided(module, query, key, value, attention_mask, **others)
    heads = query.shape[1]
    sinks = None if s_aux is None else s_aux.narrow(0, share * heads, heads)
    scores = AttentionScores(query.shape[3] ** -0.5 if scaling is None else scaling, sliding_window, softcap, sinks)
    if cu_seq_lens_q is None:
        return _causal(query, key, value, scores).transpose(1, 2), None
    assert max_length_q is not None
    cu_keys, longest = cu_seq_lens_q, max_length_q
    if prefixes is not None:
        key, value = (gather(states, 2, prefixes.keys) for states in (key, value))
        cu_keys, longest = prefixes.cu_seqlens, prefixes.max_seqlen
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        if scores.plain:
            return _varlen(query, key, value, scores, (cu_seq_lens_q, cu_keys), (max_length_q, longest)), None
        return flexible(query, key, value, scores, (cu_seq_lens_q, cu_keys), _compiled_flex_attention()), None
    starts = on_host(cu_seq_lens_q), on_host(cu_keys)
    if _by_blocks(query, value, longest, scores) and key.shape[2] <= SHORT * (len(cu_keys) - 1):
        return block_attention(query, key, value, scores.scale, starts).transpose(1, 2), None
    queries, keys = (of_line.diff().tolist() for of_line in starts)
    sequences = zip(query.split(queries, 2), key.split(keys, 2), value.split(keys, 2), strict=True)
    # A row that is a prefix of another row has no query of its own.
    outputs = [_causal(q, k, v, scores).transpose(1, 2) for q, k, v in sequences if q.shape[2]]
    return torch.cat(outputs, 1), None  # [1, N, heads, head_dim]


@dataclass(frozen=True)
class AttentionScores:
    """The way in which a layer turns the products of queries and keys into scores.

    Attributes:
        scale: Factor on the products.
        window: Number of the last tokens that a token sees, itself included; None for all.
        cap: Bound of the scores, `softcap` of `packed_attention`.
        sinks: `[heads]`, attention sinks, `s_aux` of `packed_attention`.
    """

    scale: float
    window: int | None = None
    cap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether the layer only takes a softmax of the scaled products, without cap and sinks."""
        return self.cap is None and self.sinks is None


def _causal(query: Tensor, key: Tensor, value: Tensor, scores: AttentionScores) -> Tensor:
    """Attention, `[S, heads, L, head_dim]`, where each line is one sequence; queries belong to its last tokens."""
    queries, length = query.shape[2], key.shape[2]
    reach = length if scores.window is None else scores.window
    if not scores.plain:
        return _written_out(query, key, value, scores, _seen(queries, length, reach, query.device))
    if _by_blocks(query, value, length, scores):
        return block_attention(query, key, value, scores.scale)
    whole = queries == length <= reach
    mask = {"is_causal": True} if whole else {"attn_mask": _seen(queries, length, reach, query.device)}
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(query, key, value, scale=scores.scale, enable_gqa=grouped, **mask)


def _by_blocks(query: Tensor, value: Tensor, longest: int, scores: AttentionScores) -> bool:
    """Whether `block_attention` computes rows of at most `longest` tokens."""
    narrow = query.is_cpu and query.dtype == torch.bfloat16 and query.shape[3] == value.shape[3]
    return narrow and scores.plain and (scores.window is None or longest <= scores.window)


def _seen(queries: int, length: int, reach: int, device: torch.device) -> Tensor:
    """`[queries, L]` bool: whether each of the last tokens sees each token, at most `reach` back, itself included."""
    position = torch.arange(length, device=device)
    behind = position[length - queries :, None] - position
    return (behind >= 0) & (behind < reach)


def _written_out(query: Tensor, key: Tensor, value: Tensor, scores: AttentionScores, seen: Tensor) -> Tensor:
    """Attention by its formula; `seen` is `[queries, L]`. Memory grows with the square of the longest sequence."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    of_pairs = (query @ key.transpose(2, 3)) * scores.scale  # [S, heads, queries, L]
    if scores.cap is not None:
        of_pairs = scores.cap * torch.tanh(of_pairs / scores.cap)
    of_pairs = of_pairs.masked_fill(~seen, -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.to(of_pairs.dtype).view(1, -1, 1, 1).expand(*of_pairs.shape[:3], 1)
        of_pairs = torch.cat([of_pairs, sinks], 3)
    wide = torch.promote_types(query.dtype, torch.float32)
    probabilities = of_pairs.softmax(3, dtype=wide).to(query.dtype)
    return probabilities[..., : seen.shape[1]] @ value


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: AttentionScores,
    starts: tuple[Tensor, Tensor],
    longest: tuple[int, int],
) -> Tensor:
    """`packed_attention` with plain scores, by one CUDA kernel over all sequences: `[1, N, heads, head_dim]`.

    `starts` and `longest` each have an entry for the queries and one for the keys.
    """
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))  # [N, heads, head_dim]
    # The window counts the tokens to the left and to the right of a token, itself not included; -1 means no limit.
    left = -1 if scores.window is None else scores.window - 1
    grouped = q.shape[1] != k.shape[1]
    out = varlen_attn(q, k, v, *starts, *longest, scale=scores.scale, window_size=(left, 0), enable_gqa=grouped)
    assert isinstance(out, Tensor)
    return out[None]


def use_flash_attention_3(device: torch.device) -> None:
    """Let torch's packed attention use the kernels of flash attention 3, in this process.

    Raises:
        UserError: They are not installed, or not for this device.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        raise UserError(
            f"`flash_attention` is 3, whose kernels are for GPUs of compute capability 9.0, and the run is on {device};"
            " leave it out"
        )
    if find_spec("flash_attn_interface") is None:
        raise UserError(
            "`flash_attention` is 3, and the package `flash_attn_interface` is not installed; install flash attention"
            " 3, or leave it out"
        )
    from torch.nn.attention import activate_flash_attention_impl

    activate_flash_attention_impl("FA3")


def flexible(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: AttentionScores,
    starts: tuple[Tensor, Tensor],
    flex_attention: Callable[..., Any],
) -> Tensor:
    """`packed_attention` by one CUDA kernel that is compiled for the scores: `[1, N, heads, head_dim]`.

    The kernel also returns log z, where z is the sum of exp(score). A sink takes `exp(sink) / (z + exp(sink))` of the
    attention. So the result is the kernel's output times `sigmoid(log z - sink)`.

    Args:
        query: `[1, heads, N, head_dim]`, the line.
        key: `[1, kv_heads, K, head_dim]`, the keys that the sequences see, one sequence after another.
        value: Shaped as `key`.
        scores: Rule by which the layer turns products into scores.
        starts: `[sequences + 1]` int32 each, where the sequences start among the queries, and among the keys.
        flex_attention: Torch's function, compiled; uncompiled, it computes the same on any device, without a kernel.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    # A number would be compiled as an argument of any value, which torch passes to no kernel; a tensor it does.
    cap = None if scores.cap is None else torch.full((), scores.cap, device=query.device)

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return score if cap is None else cap * torch.tanh(score / cap)

    out, of_lines = flex_attention(
        query,
        key,
        value,
        score_mod=capped,
        block_mask=seen_blocks(*starts, query.shape[2], key.shape[2], scores.window),
        scale=scores.scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if scores.sinks is not None:
        rest = torch.sigmoid(of_lines.lse - scores.sinks.to(of_lines.lse.dtype)[:, None])  # [1, heads, N]
        out = out * rest[..., None].to(out.dtype)
    outputs: Tensor = out.transpose(1, 2)
    return outputs


def seen_blocks(cu_queries: Tensor, cu_keys: Tensor, queries: int, keys: int, window: int | None) -> Any:
    """Flex attention's mask of a packed line: which tokens see each other, and which blocks have such tokens.

    Its cost grows with the square of the number of blocks, not of tokens as that of `create_block_mask` does. It does
    not make the host wait for the device.

    Args:
        cu_queries: `[sequences + 1]`, where the sequences start among the queries.
        cu_keys: `[sequences + 1]`, where they start among the keys; the queries belong to the last keys of a sequence.
        queries: Number of queries.
        keys: Number of keys.
        window: Number of the last tokens that a token sees, itself included; None for all.
    """
    from torch.nn.attention.flex_attention import BlockMask

    place, ends = torch.arange(max(queries, keys), device=cu_keys.device), (cu_queries[1:], cu_keys[1:])
    of_query = torch.searchsorted(ends[0].contiguous(), place[:queries], right=True)
    of_key = torch.searchsorted(ends[1].contiguous(), place[:keys], right=True)
    own = place[:queries] + (ends[1] - ends[0])[of_query]  # each query's own key

    def seen(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        within = (of_query[query] == of_key[key]) & (own[query] >= key)
        return within if window is None else within & (own[query] - key < window)

    def edges(length: int) -> tuple[Tensor, Tensor]:  # the first and the last token of each block
        first = torch.arange(0, length, BLOCK, device=cu_keys.device)
        return first, (first + BLOCK - 1).clamp(max=length - 1)

    (first, last), (first_key, last_key) = edges(queries), edges(keys)
    touched = (own[last][:, None] >= first_key) & (of_query[first][:, None] <= of_key[last_key])
    if window is not None:
        touched &= own[first][:, None] - last_key < window
    # For each block of queries, the blocks of keys that it touches come first.
    order = touched.to(torch.int32).argsort(dim=1, descending=True, stable=True)
    return BlockMask.from_kv_blocks(
        touched.sum(1, dtype=torch.int32)[None, None],
        order.to(torch.int32)[None, None],
        BLOCK_SIZE=BLOCK,
        mask_mod=seen,
        seq_lengths=(queries, keys),
    )


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)
