"""Which rows go from whom to whom when the rows of one layout are read in another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.data.layout import Layout


@dataclass(frozen=True)
class Route:
    """The ways of a row space's rows, seen from one rank; the same for every value of the space.

    A row that a rank holds and reads stays there. Other rows come from the first peer that holds them, each once,
    by position. A row that is read several times (a prompt, beside its samples) comes once and is repeated.

    Attributes:
        ranks: Who takes part: the ranks of both layouts, ascending.
        introducer: The one of them that tells newcomers the columns' dtypes.
        newcomers: Ranks that read and have made nothing themselves.
        sends: For each of `ranks` the rows for it: indices into the rows that this rank holds.
        keeps: The rows that this rank both holds and reads, likewise.
        receives: For each of `ranks` the rows from it: positions in the row space.
        order: For each row that this rank reads, its place among the kept and then the received.
        same: Whether this rank reads just the rows that it holds, in their order.
        moves: Whether any rank sends anything.
    """

    ranks: tuple[int, ...]
    introducer: int
    newcomers: tuple[int, ...]
    sends: tuple[Tensor, ...]
    keeps: Tensor
    receives: tuple[Tensor, ...]
    order: Tensor
    same: bool
    moves: bool

    @classmethod
    def find(
        cls, rank: int, source: Layout, target: Layout, places: tuple[Tensor, Tensor], wanted: Sequence[Tensor]
    ) -> Route:
        """The ways of rows that were made in `source` and are read in `target`.

        Args:
            rank: A rank of either layout.
            source: Where the rows were made.
            target: Where they are read.
            places: For each row `[N]` its shard in `source`, and `[N]` its index there.
            wanted: For each shard of `target` the positions of the rows that it reads; they may repeat.
        """
        shard_of, index_of = places
        needed: list[Tensor] = [torch.unique(rows) for rows in wanted]
        none = torch.empty(0, dtype=torch.int64)

        def way(giver: int, taker: int) -> Tensor:
            """Positions of the rows that `taker` has from `giver`, itself included."""
            if giver not in source.ranks or taker not in target.ranks:
                return none
            holds_the_same = taker in source.ranks and source.shard(giver) == source.shard(taker)
            if giver != taker and (holds_the_same or not source.publishes(giver)):
                return none
            rows = needed[target.shard(taker)]
            return rows[shard_of[rows] == source.shard(giver)]

        ranks = tuple(sorted({*source.ranks, *target.ranks}))
        newcomers = tuple(taker for taker in target.ranks if taker not in source.ranks)
        kept = way(rank, rank)
        receives = tuple(none if giver == rank else way(giver, rank) for giver in ranks)
        reads = wanted[target.shard(rank)] if rank in target.ranks else none
        arrived, by_position = torch.cat([kept, *receives]).sort()
        return cls(
            ranks=ranks,
            introducer=source.ranks[0],
            newcomers=newcomers,
            sends=tuple(none if taker == rank else index_of[way(rank, taker)] for taker in ranks),
            keeps=index_of[kept],
            receives=receives,
            order=by_position[torch.searchsorted(arrived, reads)],
            same=_is_all_in_order(rank, source, shard_of, index_of, reads),
            moves=any(len(way(taker, taker)) < len(needed[target.shard(taker)]) for taker in target.ranks)
            or bool(newcomers),
        )


def _is_all_in_order(rank: int, source: Layout, shard_of: Tensor, index_of: Tensor, reads: Tensor) -> bool:
    """Whether `reads` are the rows that `rank` holds in `source`, one after another."""
    if rank not in source.ranks:
        return False
    shard = source.shard(rank)
    held = int((shard_of == shard).sum())
    return bool((shard_of[reads] == shard).all()) and torch.equal(index_of[reads], torch.arange(held))
