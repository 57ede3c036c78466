"""The rows that come of others in one call of a node: their paths, and the seeds that they are sampled with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.values.path import RowPath, hashed


@dataclass(frozen=True)
class Earlier:
    """What a node made of each of `B` rows before, in the same run of it.

    Attributes:
        calls: `[B]` int64, how often it generated from the row.
        children: `[B]` int64, how many rows came of it.
    """

    calls: Tensor
    children: Tensor

    @classmethod
    def none(cls, rows: int) -> Earlier:
        """Nothing yet."""
        zeros = torch.zeros(rows, dtype=torch.int64)
        return cls(zeros, zeros)


@dataclass(frozen=True)
class Children:
    """`K` rows that come of others, those of one parent in consecutive rows.

    Attributes:
        path: Of each.
        parent: `[K]` int64, the row that each comes of.
        number: `[K]` int64, of each among those of its parent in this call.
        call: `[K]` int64, how often the node generated from its parent before.
    """

    path: RowPath
    parent: Tensor
    number: Tensor
    call: Tensor

    @classmethod
    def of(cls, parents: RowPath, counts: Tensor, node: str, earlier: Earlier | None = None) -> Children:
        """So many of each row.

        Args:
            parents: The path of each of `B` rows.
            counts: `[B]` int64.
            node: Which makes them.
            earlier: What it made of each row before; nothing where None.
        """
        earlier = earlier or Earlier.none(len(parents))
        parent = torch.arange(len(parents)).repeat_interleave(counts)
        path = parents.children(counts, node, earlier.children)
        return cls(path, parent, path.index - earlier.children[parent], earlier.calls[parent])

    def seeds(self, run_seed: int, draw: int, turn: int = 0) -> list[int]:
        """`K` seeds, see `sampling_seed`."""
        return [self.seed(row, run_seed, draw, turn) for row in range(len(self.path))]

    def seed(self, row: int, run_seed: int, draw: int, turn: int = 0, seat: str = "") -> int:
        """That of one row, or of a seat of the game that begins with this row."""
        above = self.path.numbers[row, :-1].tolist()
        node = self.path.levels[-1] + (f"/{seat}" if seat else "")
        return sampling_seed(run_seed, draw, node, above, int(self.number[row]), int(self.call[row]), turn)


def sampling_seed(
    run_seed: int, draw: int, node: str, parent: Sequence[int], child: int, call: int = 0, turn: int = 0
) -> int:
    """The seed of one response, 63 bits: the same whatever the ranks, and other for every other argument.

    Args:
        run_seed: Of the run.
        draw: How often prompts were drawn before.
        node: The node that samples.
        parent: The path of the row that is answered or continued; of a prompt its id.
        child: The number of the response among those to it.
        call: How often this parent was generated from before, in this node and draw; a number of the row's, not of the
            rank's calls.
        turn: Of the response, from 0.
    """
    where = node + (f"#{call}" if call else "") + (f"@{turn}" if turn else "")
    key = f"{run_seed}/{draw}/{'.'.join(map(str, parent))}/{child}/{where}"
    return hashed(key) >> 1
