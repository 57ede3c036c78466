"""Causal attention over packed sequences, under a name that transformers models can be loaded with.

A mask over the whole line would grow with the square of its length. Here each sequence attends to itself alone, so a
packed line costs what its sequences cost. No function that makes masks is registered beside it: transformers then
makes none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from rlflow.errors import UserError

PACKED_ATTENTION = "rlflow_packed"
Attention = Callable[..., tuple[Tensor, None]]


def register_packed_attention() -> None:
    """Make `attn_implementation=PACKED_ATTENTION` known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED_ATTENTION, packed_attention)


@dataclass(frozen=True)
class Heads:
    """The attention heads of a model.

    Attributes:
        count: Of queries.
        shared: Of keys and values.
        width: Of each.
        layers: That have them.
    """

    count: int
    shared: int
    width: int
    layers: int

    @classmethod
    def of(cls, config: Any) -> Heads:
        """Those of a transformers configuration."""
        text = config.get_text_config()
        count: int = text.num_attention_heads
        shared = getattr(text, "num_key_value_heads", None) or count
        width = getattr(text, "head_dim", None) or text.hidden_size // count
        return cls(count, shared, width, text.num_hidden_layers)


def check_sequence_parallel(config: Any, size: int, role: str, packing: bool = True) -> None:
    """Refuse sequences that are divided among more ranks than a model's attention can be.

    Args:
        config: The model's transformers configuration.
        size: How many ranks divide each sequence of the role.
        role: For the message.
        packing: Whether forward passes are without padding.

    Raises:
        UserError: Heads do not divide, or forward passes are padded.
    """
    if size == 1:
        return
    if not packing:
        raise UserError(
            f"`strategy.packing` is off, and {size} ranks divide the sequences of `{role}`, which are packed for it;"
            " turn it on, or divide none"
        )
    heads = Heads.of(config)
    legal = [fit for fit in range(1, heads.count + 1) if _fits(heads, fit)]
    if size not in legal:
        raise UserError(
            f"the sequence-parallel size of `{role}` is {size}, and its model has {heads.count} attention heads and"
            f" {heads.shared} of keys and values, which {size} ranks cannot divide; use one of"
            f" {', '.join(map(str, legal))}"
        )


def _fits(heads: Heads, size: int) -> bool:
    """Each rank attends with its share of the heads; where keys and values are fewer, some ranks have the same."""
    return heads.count % size == 0 and (heads.shared % size == 0 or size % heads.shared == 0)


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
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence; transformers calls it in every layer. Dropout is never applied.

    Args:
        module: The attention layer.
        query: `[S, heads, L, head_dim]`.
        key: `[S, kv_heads, L, head_dim]`.
        value: As `key`.
        attention_mask: None, as nothing makes one.
        scaling: Factor on the scores; None for `head_dim ** -0.5`.
        cu_seq_lens_q: `[sequences + 1]` int32, where the sequences of the one line start; None where each line is one.
        max_length_q: The longest sequence of the line.
        sliding_window: How many tokens back a token sees, itself included; None for all.
        softcap: Refused when set.
        s_aux: Refused when set.
        divided: Where ranks divide the line among them, what brings it together around this function; else None.
        others: What else transformers passes along.

    Raises:
        UserError: The model caps its attention scores or has attention sinks, which is not supported here.
    """
    assert attention_mask is None
    if divided is not None:
        others |= {"scaling": scaling, "cu_seq_lens_q": cu_seq_lens_q, "max_length_q": max_length_q}
        others |= {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        return divided(module, query, key, value, attention_mask, **others)
    if softcap is not None or s_aux is not None:
        raise UserError(f"{type(module).__name__} caps attention scores or has attention sinks; use another model")
    if cu_seq_lens_q is None:
        return _causal(query, key, value, scaling, sliding_window).transpose(1, 2), None
    assert max_length_q is not None
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _varlen(query, key, value, scaling, cu_seq_lens_q, max_length_q, sliding_window), None
    lengths = cu_seq_lens_q.diff().tolist()
    sequences = zip(*(torch.split(states, lengths, dim=2) for states in (query, key, value)), strict=True)
    outputs = [_causal(q, k, v, scaling, sliding_window).transpose(1, 2) for q, k, v in sequences]
    return torch.cat(outputs, 1), None  # [1, N, heads, head_dim]


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None) -> Tensor:
    """Attention where each line is one sequence: `[S, heads, L, head_dim]`."""
    length = query.shape[2]
    grouped = query.shape[1] != key.shape[1]
    if window is None or length <= window:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    position = torch.arange(length, device=query.device)
    behind = position[:, None] - position
    seen = (behind >= 0) & (behind < window)
    return scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale, enable_gqa=grouped)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, cu: Tensor, longest: int, window: int | None
) -> Tensor:
    """The same by one CUDA kernel over all sequences: `[1, N, heads, head_dim]`."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))  # [N, heads, head_dim]
    # The window counts the tokens to the left and to the right of a token, itself not included; -1 is no limit.
    left = -1 if window is None else window - 1
    grouped = q.shape[1] != k.shape[1]
    out = varlen_attn(q, k, v, cu, cu, longest, longest, scale=scale, window_size=(left, 0), enable_gqa=grouped)
    assert isinstance(out, Tensor)
    return out[None]
