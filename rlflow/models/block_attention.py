"""Causal attention in bfloat16 on the CPU: a block of queries at a time, by plain products of matrices.

On a processor without AMX, torch's own kernel reaches a tenth of the rate of matrix products, and it also computes what
the mask hides. Here a block of queries is not multiplied with keys of later blocks, and oneDNN multiplies. The backward
pass computes the probabilities again, so memory grows with the length of a sequence and not with its square (as in
FlashAttention-2, arXiv 2307.08691).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK = 128  # queries; of 64 to 512, no other was faster for sequences of 100 to 1,000 tokens


def block_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """`[S, heads, L, head_dim]`: each token attends to itself and to those before. The L queries are of the last keys.

    Scores are rounded to bfloat16, as transformers' eager attention rounds them; their softmax is taken in float32.

    Args:
        query: `[S, heads, L, head_dim]`.
        key: `[S, kv_heads, K, head_dim]`, K at least L; a head of keys serves `heads / kv_heads` heads of queries.
        value: Shaped as `key`.
        scale: Factor on the products of queries and keys.
    """
    apply: Any = _BlockAttention.apply
    output: Tensor = apply(query, key, value, scale)
    return output


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
        k, v = _shared(key), _shared(value)
        output = torch.empty_like(query)
        for start, end, seen in _blocks(query.shape[2], key.shape[2]):
            weights = _weights(_block(query, start, end, len(k)), k[:, :seen], scale, end - start)
            _put(output, start, end, torch.bmm(weights, v[:, :seen]))
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value = ctx.saved_tensors
        k, v = _shared(key), _shared(value)
        grad_query = torch.empty_like(query)
        # Sums over blocks, so stored wider than bfloat16.
        grad_k = torch.zeros(k.shape, dtype=torch.promote_types(k.dtype, torch.float32))
        grad_v = torch.zeros_like(grad_k)
        for start, end, seen in _blocks(query.shape[2], key.shape[2]):
            q, grad = _block(query, start, end, len(k)), _block(grads[0], start, end, len(k))
            weights = _weights(q, k[:, :seen], ctx.scale, end - start)
            grad_v[:, :seen] += torch.bmm(weights.transpose(1, 2), grad)
            grad_weights = torch.bmm(grad, v[:, :seen].transpose(1, 2))
            # With w = softmax(z): dL/dz = w * (dL/dw - sum(w * dL/dw)).
            grad_scores = torch._softmax_backward_data(grad_weights, weights, 2, weights.dtype).mul_(ctx.scale)
            _put(grad_query, start, end, torch.bmm(grad_scores, k[:, :seen]))
            grad_k[:, :seen] += torch.bmm(grad_scores.transpose(1, 2), q)
        return grad_query, grad_k.to(key.dtype).view(key.shape), grad_v.to(value.dtype).view(value.shape), None


def _shared(states: Tensor) -> Tensor:
    """Keys or values `[S, kv_heads, L, head_dim]` as `[S * kv_heads, L, head_dim]`; products of views are slow."""
    return states.contiguous().flatten(0, 1)


def _block(states: Tensor, start: int, end: int, groups: int) -> Tensor:
    """`[S * kv_heads, group * queries, head_dim]`, queries `start` to before `end` of each group that shares keys."""
    return states[:, :, start:end].reshape(groups, -1, states.shape[3])


def _put(states: Tensor, start: int, end: int, block: Tensor) -> None:
    """Write a block back to where `_block` takes it from."""
    into = states[:, :, start:end]
    into.copy_(block.view(into.shape))


def _blocks(queries: int, keys: int) -> Iterator[tuple[int, int, int]]:
    """Where each block starts and ends, and how many keys it sees."""
    ends = ((start, min(queries, start + BLOCK)) for start in range(0, queries, BLOCK))
    return ((start, end, keys - queries + end) for start, end in ends)


def _weights(query: Tensor, key: Tensor, scale: float, queries: int) -> Tensor:
    """`[S * kv_heads, group * queries, keys]`, attention of each query of a block to the keys it sees, its own last."""
    later = query.new_full((queries, queries), -torch.inf).triu_(1)
    hidden = torch.nn.functional.pad(later, (key.shape[1] - queries, 0)).repeat(query.shape[1] // queries, 1)
    return torch.baddbmm(hidden, query, key.transpose(1, 2), alpha=scale).softmax(2)
