"""The gated delta rule in float32 on the CPU, for vLLM's layers of Qwen3.5 and Qwen3-Next.

vLLM's own kernels for the CPU compute it in bfloat16 alone, and stop with "CPU GDN attention requires BF16". In float32
on the CPU an engine's logprobs can be compared with the trainer's to 1e-5, which tests and small runs do. It is slow: a
step of Python for each token of a prompt. In bfloat16, and on GPUs, vLLM's own kernels compute. See docs/design/0038.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlflow.errors import UserError

EPSILON = 1e-6  # of the norm of queries and keys, as in transformers and vLLM
KERNEL_HEADS = (64, 128)  # sizes that vLLM's kernels for the CPU were tried with; they refuse 32


def prepare(config: Any, dtype: torch.dtype) -> None:
    """Let vLLM's layers of a model compute on the CPU; called before the first of them is built in this process.

    Args:
        config: The model's transformers configuration.
        dtype: Dtype of the engine.

    Raises:
        UserError: Neither vLLM's kernels nor this file's function compute it.
    """
    _allow_float32()  # in bf16 too: an engine in float32 may come later in this process
    if dtype == torch.float32:
        return
    heads = {config.linear_key_head_dim, config.linear_value_head_dim}
    if dtype != torch.bfloat16 or not heads <= set(KERNEL_HEADS):
        raise UserError(
            f"vLLM on the CPU computes the delta rule of a {config.model_type!r} in fp32, and in bf16 for heads of the"
            f" size {' or '.join(map(str, KERNEL_HEADS))}; here it is {dtype} and the size {max(heads)}. Set"
            " `trainer.precision: fp32`, or `rollout: rlflow.rollout.TransformersEngine`"
        )


def _allow_float32() -> None:
    """Put a function in place of vLLM's that computes in float32 here, and in other dtypes as before."""
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.utils.torch_utils import _resolve_layer_name

    own = gdn_attention.cpu_gdn_attention_core
    if own.__module__ == __name__:
        return
    assert not gdn_attention._CPU_GDN_ATTENTION_OPS_REGISTERED, "vLLM has registered its own function"

    def core(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: Any) -> None:
        if mixed_qkv.dtype != torch.float32:
            own(mixed_qkv, b, a, core_attn_out, layer_name)
            return
        context = get_forward_context()
        layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
        if context.attn_metadata is None:  # a run that measures memory
            return
        rows = context.attn_metadata[layer.prefix]
        if rows.num_actual_tokens > 0:
            _compute(layer, rows, mixed_qkv, b, a, core_attn_out)

    core.__signature__ = signature(own, eval_str=True)  # type: ignore[attr-defined] # vLLM registers an operator by it
    gdn_attention.cpu_gdn_attention_core = core


def _compute(layer: Any, rows: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, out: Tensor) -> None:
    """Write to `out` `[N, heads, V]` what a layer's mixer reads of `N` tokens, and its rows' new states to the cache.

    Args:
        layer: vLLM's layer.
        rows: Metadata of the `S` rows in this step: rows that grow by a token first, then prompts.
        mixed_qkv: `[N, C]`, queries, keys and values before their convolution.
        b: `[N, heads]`, writing strengths before the sigmoid.
        a: `[N, heads]`, decays before the softplus.
        out: See above.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    count = rows.num_decodes + rows.num_prefills
    starts = rows.non_spec_query_start_loc[: count + 1].long()
    slots = rows.non_spec_state_indices_tensor[:count].long()
    continues = torch.ones(count, dtype=torch.bool)
    if rows.num_prefills:
        continues[rows.num_decodes :] = rows.has_initial_state[rows.num_decodes : count]
    lengths = starts.diff()
    longest = int(lengths.max())
    real = torch.arange(longest) < lengths[:, None]  # [S, L], rows padded on the right

    def side_by_side(tokens: Tensor) -> Tensor:
        padded = tokens.new_zeros(count, longest, tokens.shape[1])
        padded[real] = tokens[: int(starts[-1])]
        return padded

    convolutions = layer.kv_cache[0] if is_conv_state_dim_first() else layer.kv_cache[0].transpose(1, 2)
    weight = layer.conv1d.weight  # [C, 1, W]
    before = convolutions[slots] * continues[:, None, None]  # [S, C, W - 1]
    line = torch.cat((before, side_by_side(mixed_qkv).transpose(1, 2)), dim=2)  # [S, C, W - 1 + L]
    ends = lengths[:, None] + torch.arange(before.shape[2])  # [S, W - 1], the last inputs of each row
    convolutions[slots] = line.gather(2, ends[:, None].expand(-1, line.shape[1], -1))
    mixed = F.silu(F.conv1d(line, weight, layer.conv1d.bias, groups=len(weight))).transpose(1, 2)  # [S, L, C]

    keys = layer.num_k_heads // layer.tp_size * layer.head_k_dim
    q, k, v = mixed.split((keys, keys, mixed.shape[2] - 2 * keys), dim=2)
    v = v.unflatten(2, (-1, layer.head_v_dim))
    groups = v.shape[2] * layer.head_k_dim // keys  # heads of values that share a head of keys
    q, k = (x.unflatten(2, (-1, layer.head_k_dim)).repeat_interleave(groups, dim=2) for x in (q, k))
    decays = -layer.A_log.float().exp() * F.softplus(side_by_side(a) + layer.dt_bias.float())
    # Padding decays and writes nothing.
    decays, strengths = decays * real[:, :, None], side_by_side(b).sigmoid() * real[:, :, None]

    memory = layer.kv_cache[1]  # [slots, heads, V, K]
    state = memory[slots] * continues[:, None, None, None]
    read, memory[slots] = gated_delta_rule(q, k, v, decays, strengths, state)
    out[: int(starts[-1])] = read[real]


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decays: Tensor, strengths: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule (arXiv 2412.06464, section 3.1), token by token.

    With keys and queries of norm 1, and queries divided by the root of their size K:

        S_t = exp(g_t) S_t-1 (I - b_t k_t k_t^T) + b_t v_t k_t^T,    o_t = S_t q_t

    Args:
        q: `[S, L, heads, K]`.
        k: `[S, L, heads, K]`.
        v: `[S, L, heads, V]`.
        decays: `[S, L, heads]`, g.
        strengths: `[S, L, heads]`, b.
        state: `[S, heads, V, K]`, before the first token.

    Returns:
        `[S, L, heads, V]`, o; and the state after the last token.
    """
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    read = []
    for t in range(q.shape[1]):
        state = state * decays[:, t].exp()[..., None, None]
        change = (v[:, t] - torch.einsum("shvk,shk->shv", state, k[:, t])) * strengths[:, t, :, None]
        state = state + change[..., None] * k[:, t, :, None]
        read.append(torch.einsum("shvk,shk->shv", state, q[:, t]))
    return torch.stack(read, dim=1), state
