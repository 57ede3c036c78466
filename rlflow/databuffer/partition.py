"""Which rows each shard holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Partition:
    """Which rows each shard holds.

    Attributes:
        shards: For each shard the positions of its rows (indices into the arrays of their `RowSpace`), in the order
            in which the shard holds them. Every row is in exactly one shard.
    """

    shards: tuple[Tensor, ...]

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """For each row `[N]` int32 its shard, and `[N]` int32 its index within the shard."""
        rows = torch.cat(self.shards)
        counts = torch.tensor([held.numel() for held in self.shards])
        shard, index = (torch.empty(len(rows), dtype=torch.int32) for _ in range(2))
        shard[rows] = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(counts)
        index[rows] = (torch.arange(len(rows)) - (counts.cumsum(0) - counts).repeat_interleave(counts)).int()
        return shard, index
