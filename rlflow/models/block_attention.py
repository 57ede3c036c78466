"""Causal attention in bfloat16 on the CPU: a block of queries at a time, by plain products of matrices.

On a processor without AMX, torch's own kernel reaches a tenth of the rate of matrix products, and it also computes what
the mask hides. Here a block of queries is not multiplied with keys of later blocks, and oneDNN multiplies. The backward
pass computes the probabilities again, so memory grows with the length of a sequence and not with its square (as in
FlashAttention-2, arXiv 2307.08691). A block may hold several short rows of a line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK = 128  # queries; of 64 to 512, no other was faster for sequences of 100 to 1,000 tokens


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, starts: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """`[S, heads, L, head_dim]`: each token attends to itself and earlier tokens. The L queries are of the last keys.

    Scores are rounded to bfloat16, as transformers' eager attention rounds them; their softmax is taken in float32.

    Args:
        query: `[S, heads, L, head_dim]`.
        key: `[S, kv_heads, K, head_dim]`, K at least L; a head of keys serves `heads / kv_heads` heads of queries.
        value: Shaped as `key`.
        scale: Factor on the products of queries and keys.
        starts: Starts of the queries and of the keys of each row, `[rows + 1]` each, on the host, for a line of several
            rows. A row attends to itself. None where each line is one row.
    """
    if starts is None:
        starts = torch.tensor([0, query.shape[2]]), torch.tensor([0, key.shape[2]])
    apply: Any = _BlockAttention.apply
    output: Tensor = apply(query, key, value, scale, *starts)
    return output


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, cu_queries: Tensor, cu_keys: Tensor
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, cu_queries, cu_keys)
        ctx.scale = scale
        k, v = _shared(key), _shared(value)
        output = torch.empty_like(query)
        for block in _blocks(cu_queries, cu_keys):
            weights = _weights(_block(query, block, len(k)), k, scale, block)
            _put(output, block, torch.bmm(weights, v[:, block.keys]))
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        query, key, value, *starts = ctx.saved_tensors
        k, v = _shared(key), _shared(value)
        grad_query = torch.empty_like(query)
        # Sums over blocks, so stored wider than bfloat16.
        grad_k = torch.zeros(k.shape, dtype=torch.promote_types(k.dtype, torch.float32))
        grad_v = torch.zeros_like(grad_k)
        for block in _blocks(*starts):
            q, grad = _block(query, block, len(k)), _block(grads[0], block, len(k))
            weights = _weights(q, k, ctx.scale, block)
            grad_v[:, block.keys] += torch.bmm(weights.transpose(1, 2), grad)
            grad_weights = torch.bmm(grad, v[:, block.keys].transpose(1, 2))
            # With w = softmax(z): dL/dz = w * (dL/dw - sum(w * dL/dw)).
            grad_scores = torch._softmax_backward_data(grad_weights, weights, 2, weights.dtype).mul_(ctx.scale)
            _put(grad_query, block, torch.bmm(grad_scores, k[:, block.keys]))
            grad_k[:, block.keys] += torch.bmm(grad_scores.transpose(1, 2), q)
        grad_key, grad_value = grad_k.to(key.dtype).view(key.shape), grad_v.to(value.dtype).view(value.shape)
        return grad_query, grad_key, grad_value, None, None, None


@dataclass(frozen=True)
class _Block:
    """Consecutive queries of a line, and the keys from the first to the last that one of them sees.

    Attributes:
        queries: Places of the queries.
        keys: Places of the keys.
        unseen: `[queries, keys]`, whether a query does not see a key.
    """

    queries: slice
    keys: slice
    unseen: Tensor


def _blocks(cu_queries: Tensor, cu_keys: Tensor) -> Iterator[_Block]:
    """The blocks of a line in which the queries of a row belong to the last of its keys."""
    counts = cu_queries.diff()
    own = torch.arange(int(cu_queries[-1])) + (cu_keys[1:] - cu_queries[1:]).repeat_interleave(counts)
    first = cu_keys[:-1].repeat_interleave(counts)  # what each query sees first
    for start in range(0, len(own), BLOCK):
        queries = slice(start, min(len(own), start + BLOCK))
        keys = slice(int(first[start]), int(own[queries.stop - 1]) + 1)
        place = torch.arange(keys.start, keys.stop)
        yield _Block(queries, keys, (place > own[queries, None]) | (place < first[queries, None]))


def _shared(states: Tensor) -> Tensor:
    """Keys or values `[S, kv_heads, L, head_dim]` as `[S * kv_heads, L, head_dim]`; products of views are slow."""
    return states.contiguous().flatten(0, 1)


def _block(states: Tensor, block: _Block, groups: int) -> Tensor:
    """`[S * kv_heads, group * queries, head_dim]`, the block's queries of each group that shares keys."""
    return states[:, :, block.queries].reshape(groups, -1, states.shape[3])


def _put(states: Tensor, block: _Block, found: Tensor) -> None:
    """Write the rows of a block back to where `_block` takes them from."""
    into = states[:, :, block.queries]
    into.copy_(found.view(into.shape))


def _weights(query: Tensor, key: Tensor, scale: float, block: _Block) -> Tensor:
    """`[S * kv_heads, group * queries, keys]`, attention of each query of a block to the block's keys."""
    hidden = query.new_zeros(block.unseen.shape).masked_fill_(block.unseen, -torch.inf)
    hidden = hidden.repeat(query.shape[1] // len(hidden), 1)
    return torch.baddbmm(hidden, query, key[:, block.keys].transpose(1, 2), alpha=scale).softmax(2)
