"""Rows that begin alike: their common tokens are computed once, and each row still sees all of its own.

Rows are sorted by their tokens, so that those with a common prefix are neighbours, and each is compared with the one
before it. Of a row, the line has only what the row before does not have: a prefix tree in depth-first order. Any equal
prefix is found: the prompt of a group, the trunk of a tree, the turns before a fork, the prompt of a chosen and a
rejected response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Tokens = NDArray[np.int64]  # `[tokens]` of one row, as the model reads them

# A prefix of fewer tokens is read by each row anew. Short prompts begin alike by chance or by a chat template, and the
# keys of rows that share are copied in every layer: below about 8 tokens that takes longer than the tokens do.
SHORTEST = 8
# A token that a row shares takes a key and a value in each layer in place of all activations: at most a sixteenth of
# the memory of a token (4 of 34 widths in arXiv 2205.05198, equation 1, halved at least by fewer heads of keys).
SHARED_COST = 16


@dataclass(frozen=True)
class Prefixes:
    """What the tokens of a line attend to where its rows share tokens. `K` tokens are read, counted row by row.

    A prompt 5 6 with the responses 7 8 and 9 8 (were prefixes of 2 tokens shared) makes the line 5 6 7 | 9, and

        keys        [0, 1, 2, 0, 1, 3]     5 6 7 and 5 6 9
        cu_seqlens  [0, 3, 6]
        max_seqlen  3

    The queries of a row, which `ModelInput.cu_seqlens` counts, are the last of its keys: 3 of 3, then 1 of 3.

    Attributes:
        keys: `[K]` int64, where in the line each token of each row is.
        cu_seqlens: `[S + 1]` int32, where each row starts in `keys`, and the end.
        max_seqlen: Length of the longest row.
    """

    keys: Tensor
    cu_seqlens: Tensor
    max_seqlen: int

    @classmethod
    def of(cls, keys: Sequence[Tokens]) -> Prefixes:
        """Those of rows whose tokens are at these places of the line."""
        lengths = [len(of_row) for of_row in keys]
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        return cls(torch.from_numpy(np.concatenate(keys)), starts, max(lengths))

    def lengths(self) -> Tensor:
        """`[S]` int64, tokens of each row."""
        return self.cu_seqlens.diff().long()

    def padded(self, length: int, padding: int) -> Prefixes:
        """The same for a line of `length` tokens with padding behind it, a row of its own."""
        if padding == 0:
            return self
        keys = torch.cat([self.keys, torch.arange(length, length + padding)])
        starts = torch.cat([self.cu_seqlens, self.cu_seqlens[-1:] + padding])
        return Prefixes(keys, starts, max(self.max_seqlen, padding))


def neighbours(rows: Sequence[Tokens]) -> tuple[list[int], list[int]]:
    """Order rows so that those which begin alike are neighbours.

    Args:
        rows: The tokens of each row.

    Returns:
        The numbers of the rows in that order; and for each, in it, how many tokens it shares with the row before, 0
        where they are fewer than `SHORTEST`.
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
    """The rows that share tokens with one another, and what they cost: tokens of the line, and a part for shared ones.

    Args:
        rows: The tokens of each row.
        budget: Most that a family may cost. A larger one is cut, in the order of the line; each part computes its
            prefix again.

    Returns:
        Row numbers and cost of each.
    """
    found: list[tuple[list[int], int]] = []
    for number, shared in zip(*neighbours(rows), strict=True):
        own = len(rows[number])
        more = own - shared + shared // SHARED_COST
        if shared and found[-1][1] + more <= budget:
            members, cost = found[-1]
            found[-1] = [*members, number], cost + more
        else:
            found.append(([number], own))
    return found


def gather(states: Tensor, dim: int, index: Tensor) -> Tensor:
    """`states.index_select(dim, index)`; the gradients of what is taken several times are summed in float32 at least.

    The sum is taken in the order of `index`, so it is the same to the bit each time.
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
        if wide.is_cuda:  # sorts; `index_add_` adds in any order there
            total.index_put_((index,), wide, accumulate=True)
        else:
            total.index_add_(0, index, wide)
        return total.to(grad.dtype).movedim(0, ctx.dim), None, None
