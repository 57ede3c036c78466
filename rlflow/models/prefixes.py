"""Rows with common prefixes: the shared tokens are computed once, and each row still sees all of its own.

Rows are sorted by their tokens, so that rows with a common prefix are neighbours, and each row is compared with the one
before it. The line has only those tokens of a row that are not in its common prefix with the row before. This is a
prefix tree in depth-first order. Any equal prefix is found: the prompt of a group, the trunk of a tree, the turns
before a fork, the prompt of a chosen and a rejected response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Tokens = NDArray[np.int64]  # `[tokens]` of one row, as the model reads them

# The shortest prefix that is shared, in tokens; a shorter one is computed for each row. Short prompts begin alike by
# chance or by a chat template. Keys of rows that share are copied in every layer, which for fewer than about 8 tokens
# takes longer than computing the tokens.
SHORTEST = 8
# The memory of a token, divided by that of a token that a row shares. The latter has a key and a value in each layer in
# place of all activations: with as many heads of keys as of queries 4 of 60 bytes for each unit of the hidden size (see
# `LoadedRole`), and half of that or less with fewer. So about a sixteenth.
SHARED_COST = 16


@dataclass(frozen=True)
class Prefixes:
    """The tokens of a line that each of its rows sees, if rows share tokens. `K` is the number of tokens of all rows.

    A prompt 5 6 with the responses 7 8 and 9 8 (were prefixes of 2 tokens shared) makes the line 5 6 7 | 9, and

        keys        [0, 1, 2, 0, 1, 3]     5 6 7 and 5 6 9
        cu_seqlens  [0, 3, 6]
        max_seqlen  3

    A row's queries are the tokens that it adds to the line; `ModelInput.cu_seqlens` counts them. They are the last
    tokens of the row: all 3 of the first row, and 1 of 3 of the second.

    Attributes:
        keys: `[K]` int64, place in the line of each token of each row.
        cu_seqlens: `[S + 1]` int32, where each row starts in `keys`, and the end.
        max_seqlen: Length of the longest row.
    """

    keys: Tensor
    cu_seqlens: Tensor
    max_seqlen: int

    @classmethod
    def of(cls, keys: Sequence[Tokens]) -> Prefixes:
        """The prefixes of rows whose tokens are at the places `keys` of the line, given row by row."""
        lengths = [len(of_row) for of_row in keys]
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        return cls(torch.from_numpy(np.concatenate(keys)), starts, max(lengths))

    def lengths(self) -> Tensor:
        """`[S]` int64, tokens of each row."""
        return self.cu_seqlens.diff().long()

    def padded(self, length: int, padding: int) -> Prefixes:
        """The prefixes of a line of `length` tokens that is followed by padding, which is a row of its own."""
        if padding == 0:
            return self
        keys = torch.cat([self.keys, torch.arange(length, length + padding)])
        starts = torch.cat([self.cu_seqlens, self.cu_seqlens[-1:] + padding])
        return Prefixes(keys, starts, max(self.max_seqlen, padding))


def neighbours(rows: Sequence[Tokens]) -> tuple[list[int], list[int]]:
    """Order rows so that rows with a common prefix are neighbours.

    Args:
        rows: The tokens of each row.

    Returns:
        The numbers of the rows in that order. And for each row in that order the number of tokens that it shares with
        the row before, 0 where it is less than `SHORTEST`.
    """
    order = sorted(range(len(rows)), key=lambda row: rows[row].tobytes())
    shared, before = [], np.empty(0, np.int64)
    for number in order:
        row = rows[number]
        shortest = min(len(before), len(row))
        differ = np.flatnonzero(before[:shortest] != row[:shortest])
        common = int(differ[0]) if len(differ) else shortest
        shared.append(common if common >= SHORTEST else 0)
        before = row
    return order, shared


def families(rows: Sequence[Tokens], budget: int) -> list[tuple[list[int], int]]:
    """Families of rows that share tokens with one another, and their costs.

    A family costs its tokens in the line, and a `SHARED_COST`-th for each token that a row shares with the row before.

    Args:
        rows: The tokens of each row.
        budget: Most that a family may cost. A larger family is cut at its shallowest fork. So if all rows begin with a
            chat template, rows of one prompt stay together. Rows that fork at the same place are put together as far as
            the budget allows. Each part computes its prefix again.

    Returns:
        Row numbers and cost of each family.
    """
    order, shared = neighbours(rows)
    lengths = [len(rows[number]) for number in order]
    added = [own - common + common // SHARED_COST for own, common in zip(lengths, shared, strict=True)]
    before = [0, *accumulate(added)]

    def cost(first: int, end: int) -> int:
        return lengths[first] + before[end] - before[first + 1]

    found: list[tuple[int, int]] = []
    todo = [(0, len(order))] if order else []
    while todo:
        first, end = todo.pop()
        least = min(shared[first + 1 : end], default=1)
        if end - first == 1 or (least > 0 and cost(first, end) <= budget):
            found.append((first, end))
            continue
        forks = [first, *(place for place in range(first + 1, end) if shared[place] == least), end]
        leaves = first  # start of the rows that are in no part yet, each a branch of its own
        for start, stop in pairwise(forks):
            if stop - start > 1 or least == 0 or cost(leaves, stop) > budget:
                found += [(leaves, start)] if leaves < start else []
                leaves = start
            if stop - start > 1:
                todo.append((start, stop))
                leaves = stop
        found += [(leaves, end)] if leaves < end else []
    return [(order[first:end], cost(first, end)) for first, end in found]


def gather(states: Tensor, dim: int, index: Tensor) -> Tensor:
    """`states.index_select(dim, index)`, with gradients of repeated indices summed in float32 at least.

    Gradients are added in the order of `index`, so the sum is the same to the bit each time.
    """
    apply: Any = _Gather.apply
    taken: Tensor = apply(states, dim, index)
    return taken


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, dim: int, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.dim, ctx.length = dim, states.shape[dim]
        return states.index_select(dim, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        grad = grads[0].movedim(ctx.dim, 0)
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        total = wide.new_zeros(ctx.length, *wide.shape[1:])
        if wide.is_cuda:  # it sorts the indices; on a GPU `index_add_` adds in any order
            total.index_put_((index,), wide, accumulate=True)
        else:
            total.index_add_(0, index, wide)
        return total.to(grad.dtype).movedim(0, ctx.dim), None, None
