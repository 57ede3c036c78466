"""The path of a row: the numbers that lead to it from its prompt, level by level."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlflow.errors import UserError, did_you_mean
from rlflow.values.host_copy import joined, on_device, on_host, rows_at

NO_GROUP = torch.iinfo(torch.int64).min  # the group of a dropped row, which is compared with no other row


@dataclass(frozen=True)
class RowPath:
    """The paths of `B` rows in the tree of rows: the id of a row's prompt, then the number of each child on the way.

    Two rows have a common ancestor if their paths begin with the same numbers. All ranks that use rows know their
    paths, so paths are never sent with a value.

    Two questions to each of two prompts, and two answers to the first of these questions:

        levels     ("batch",)    ("batch", "question")    ("batch", "question", "answer")
        numbers    4             4 0                      4 0 0
                   7             4 1                      4 0 1
                                 7 0
                                 7 1

    `group` of the questions is 4 4 7 7: samples of the same prompt are compared. `group_of("batch")` of the answers is
    4 4.

    Attributes:
        numbers: `[B, depth]` int64.
        levels: Name of each level: `batch`, then the node that made the rows of each further level.
        dropped: `[B]` bool on the CPU, True for rows that were dropped: their group is `NO_GROUP`. None if none was.
    """

    numbers: Tensor
    levels: tuple[str, ...]
    dropped: Tensor | None = None

    @classmethod
    def of_groups(cls, groups: Tensor, name: str = "rollout") -> RowPath:
        """Paths of samples, given the id of each sample's prompt `[B]`; samples of a prompt are numbered in order."""
        return cls(torch.stack([groups, index_among(groups[:, None])], dim=1), ("batch", name))

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def depth(self) -> int:
        """Number of numbers in a path."""
        return self.numbers.shape[1]

    @property
    def root(self) -> Tensor:
        """`[B]` int64, the id of the prompt that each row descends from."""
        return self._of(on_host(self.numbers)[:, 0])

    @property
    def index(self) -> Tensor:
        """`[B]` int64, the number of each row among its siblings; for a prompt, its id."""
        return self._of(on_host(self.numbers)[:, -1])

    @property
    def group(self) -> Tensor:
        """`[B]` int64, equal for rows with the same parent, on any rank; for samples of a prompt, the prompt's id."""
        return self._group(max(1, self.depth - 1))

    def group_of(self, level: str) -> Tensor:
        """`[B]` int64, equal for rows below the same row of `level`, on any rank.

        For the level `batch` it is the id of this row; for other levels it is a number below 0.

        Raises:
            UserError: These rows have no such level.
        """
        if level not in self.levels:
            raise UserError(
                f"rows of `{self.levels[-1]}` have no level {level!r}; theirs are {', '.join(self.levels)}."
                + did_you_mean(level, self.levels)
            )
        return self._group(1 + self.levels.index(level))

    def take(self, index: Tensor) -> RowPath:
        """The rows at `index` `[K]` int64, in that order."""
        dropped = None if self.dropped is None else self.dropped[on_host(index)]
        return RowPath(rows_at(self.numbers, index), self.levels, dropped)

    def followed_by(self, other: RowPath) -> RowPath:
        """These rows, followed by the rows of `other`.

        Raises:
            UserError: The rows have different levels, so they were made by different nodes.
        """
        if self.levels != other.levels:
            here, there = " > ".join(self.levels), " > ".join(other.levels)
            raise UserError(
                f"rows of {here} and of {there} are joined, which descend from others; join rows of one node"
            )
        return RowPath(joined([self.numbers, other.numbers]), self.levels)

    def children(self, counts: Tensor, name: str, first: Tensor | None = None) -> RowPath:
        """Paths of new rows below these: `counts[0]` below the first, then `counts[1]` below the second, and so on.

        Args:
            counts: `[B]` int64, number of new rows below each row.
            name: Name of the new level.
            first: `[B]` int64, number of each row's first new child; None for 0.
        """
        parents = on_host(self.numbers).repeat_interleave(counts, dim=0)
        starts = counts.cumsum(0) - counts
        starts = (starts if first is None else starts - first).repeat_interleave(counts)
        own = torch.arange(len(parents)) - starts
        return RowPath(torch.cat([parents, own[:, None]], dim=1), (*self.levels, name))

    def below(self, depth: int, name: str) -> RowPath:
        """Paths that make these rows children of their ancestors at `depth`; siblings are numbered in order."""
        parents = on_host(self.numbers)[:, :depth]
        numbers = torch.cat([parents, index_among(parents)[:, None]], dim=1)
        return RowPath(on_device(numbers, self.numbers.device), (*self.levels[:depth], name))

    def _group(self, depth: int) -> Tensor:
        numbers = on_host(self.numbers)
        group = numbers[:, 0] if depth == 1 else -1 - _packed(numbers[:, :depth], self.levels)  # below 0: no id
        return self._of(group if self.dropped is None else group.masked_fill(self.dropped, NO_GROUP))

    def _of(self, on_cpu: Tensor) -> Tensor:
        return on_device(on_cpu.contiguous(), self.numbers.device)


def _packed(numbers: Tensor, levels: tuple[str, ...]) -> Tensor:
    """`[B]` int64, paths `[B, depth]` as one number each: the same on all ranks, and in the order of the paths.

    Each number of a child has 63 / (depth + 1) bits, and a prompt's id twice as many. Paths of two numbers have room
    for 2 million children of a row, and for ids up to 4 trillion.
    """
    depth = numbers.shape[1]
    bits = 63 // (depth + 1)
    packed = numbers[:, 0]
    for level, number in zip(levels[1:depth], numbers[:, 1:].unbind(dim=1), strict=True):
        assert bool((number < 1 << bits).all()), f"more than {1 << bits} rows of `{level}` below one"
        packed = (packed << bits) | number
    assert bool((numbers[:, 0] < 1 << (63 - bits * (depth - 1))).all()), f"too many prompts for {depth} levels"
    return packed


def index_among(parents: Tensor) -> Tensor:
    """`[B]` int64, the number of each row among the rows with the same entry of `parents` `[B, depth]`, in order."""
    of = parents[:, 0] if parents.shape[1] == 1 else torch.unique(parents, dim=0, return_inverse=True)[1]
    order = torch.argsort(of, stable=True)
    counts = torch.unique_consecutive(of[order], return_counts=True)[1]
    index = torch.empty_like(order)
    index[order] = torch.arange(len(order), device=of.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    return index


def lexicographic(numbers: Tensor) -> Tensor:
    """`[N]`, indices that sort the rows `[N, depth]` by their first numbers, then their second, and so on."""
    return torch.from_numpy(np.lexsort(numbers.flip(1).T.numpy()))  # `lexsort` sorts by the last key first


def hashed(text: str, size: int = 8) -> int:
    """The first `size` bytes of the text's BLAKE2b as a number, not below 0."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "big")
