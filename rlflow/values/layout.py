"""Places of the rows of a role: ranks, shards, and the peers that hold copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ShardBy = Literal["groups", "balanced"]


@dataclass(frozen=True)
class Layout:
    """Distribution of rows over ranks.

    Two equal layouts hold the same rows in the same order, so nothing moves between them.

    On the ranks 0 to 7:

        Layout((0, ..., 7), 8)               each rank has rows of its own, the samples of a prompt on one rank
        Layout((0, ..., 7), 8, "balanced")   each rank has about as many tokens, wherever a prompt's samples are
        Layout((0, ..., 7), 4)               ranks 0 and 1 hold the same rows, as peers of one engine or one sequence
        Layout((0, 1), 2)                    rows are on two ranks alone
        Layout((0, ..., 7), 2, tensor_parallel_size=2)   ranks 0 to 3 hold the same rows: 0 and 1 divide each layer,
                                             and so do 2 and 3; 0 and 2 divide each sequence, and so do 1 and 3

    Attributes:
        ranks: Global ranks, in order; consecutive ones hold the same shard.
        shards: The data-parallel size; divides the number of ranks.
        shard_by: `groups` keeps the samples of a prompt together, `balanced` evens out tokens.
        samples_per_update: Rows of one mini-batch. Each mini-batch is balanced by itself. None for one of all rows.
        whole_episodes: Whether `samples_per_update` counts episodes, which are then whole in a mini-batch.
        tensor_parallel_size: Number of consecutive ranks of a role that divide each layer of its model.
        expert_parallel_size: Number of consecutive ranks of a role that divide the experts of each layer; they may have
            different rows.
    """

    ranks: tuple[int, ...]
    shards: int
    shard_by: ShardBy = "groups"
    samples_per_update: int | None = None
    whole_episodes: bool = False
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1

    def __post_init__(self) -> None:
        assert self.shards > 0, self
        assert len(self.ranks) % self.shards == 0, self
        assert self.copies % self.tensor_parallel_size == 0, self
        assert len(self.ranks) % self.expert_parallel_size == 0, self

    @property
    def copies(self) -> int:
        """Number of peers that hold each shard."""
        return len(self.ranks) // self.shards

    @property
    def sequence_parallel_size(self) -> int:
        """Number of a role's ranks that divide each sequence: the peers that do not divide a layer with one another."""
        return self.copies // self.tensor_parallel_size

    def shard(self, rank: int) -> int:
        """The shard that `rank` holds; `rank` is one of `ranks`."""
        return self.ranks.index(rank) // self.copies

    def peers(self, shard: int) -> tuple[int, ...]:
        """The ranks that hold `shard`; the first of them is their leader."""
        return self.ranks[shard * self.copies : (shard + 1) * self.copies]

    def is_leader(self, rank: int) -> bool:
        """Whether `rank` is the first of its peers, which sends the rows of their shard to other ranks."""
        return rank in self.ranks and self.ranks.index(rank) % self.copies == 0
