"""Which rows go from whom to whom when the rows of one layout are read in another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rlflow.values.layout import Layout

NONE = torch.empty(0, dtype=torch.int64)


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


@dataclass(frozen=True)
class Route:
    """The ways of a row space's rows, seen from one rank; the same for every value of the space.

    A rank that holds a row and reads it has it from itself. Other rows come from the first peer that holds them, each
    once, in the order in which they are read. A row that is read several times (a prompt, beside its samples) comes
    once and is repeated.

    Attributes:
        ranks: Who takes part: the ranks of both layouts, ascending.
        introducer: The one of them that sends newcomers the columns' dtypes.
        newcomers: Ranks that read and have made nothing themselves.
        sends: For each of `ranks`, itself included, the rows for it: indices into the rows that this rank holds.
        receives: For each of `ranks`, itself included, the rows from it: positions in the row space.
        order: For each row that this rank reads, its place among those received.
        same: Whether this rank reads just the rows that it holds, in their order; then it needs none from itself.
        moves: Whether any rank sends anything to another.
    """

    ranks: tuple[int, ...]
    introducer: int
    newcomers: tuple[int, ...]
    sends: tuple[Tensor, ...]
    receives: tuple[Tensor, ...]
    order: Tensor
    same: bool
    moves: bool

    @classmethod
    def find(
        cls,
        rank: int,
        source: Layout,
        target: Layout,
        made: Partition,
        read: Partition,
        position: Tensor | None = None,
    ) -> Route:
        """The ways of rows that were made in `source` and are read in `target`; work and memory are those of one rank.

        Args:
            rank: A rank of either layout.
            source: Where the rows were made.
            target: Where they are read.
            made: The rows in `source`.
            read: Those beside which they are read, in `target`.
            position: For each row that `read` deals, which row of `made` is read beside it; None for itself.
        """
        way = _Way(rank, source, target, made, read, position)
        receives, order = way.receives()
        sends = way.sends()
        if same := way.stays():
            receives, sends = (
                tuple(NONE if other == rank else rows for other, rows in zip(way.ranks, of_ranks, strict=True))
                for of_ranks in (receives, sends)
            )
        newcomers = tuple(sorted({*target.ranks} - {*source.ranks}))
        return cls(
            ranks=way.ranks,
            introducer=source.ranks[0],
            newcomers=newcomers,
            sends=sends,
            receives=receives,
            order=order,
            same=same,
            moves=bool(newcomers) or way.some_reader_lacks_rows(),
        )


@dataclass(frozen=True)
class _Way:
    """Rows of one layout that are read in another, seen from one rank; the arguments are those of `Route.find`."""

    rank: int
    source: Layout
    target: Layout
    made: Partition
    read: Partition
    position: Tensor | None

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """`Route.ranks`."""
        return tuple(sorted({*self.source.ranks, *self.target.ranks}))

    @cached_property
    def holds(self) -> dict[int, int]:
        """The shard of each rank that made rows."""
        return {holder: place // self.source.copies for place, holder in enumerate(self.source.ranks)}

    @cached_property
    def reads(self) -> dict[int, int]:
        """The shard of each rank that reads rows."""
        return {reader: place // self.target.copies for place, reader in enumerate(self.target.ranks)}

    @cached_property
    def wanted(self) -> Tensor:
        """The rows that this rank reads, as positions among those made; none where it does not read."""
        if self.rank not in self.reads:
            return NONE
        rows = self.read.shards[self.reads[self.rank]]
        return rows if self.position is None else self.position[rows]

    def stays(self) -> bool:
        """`Route.same`."""
        return self.rank in self.holds and torch.equal(self.wanted, self.made.shards[self.holds[self.rank]])

    def receives(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """`Route.receives` and `Route.order`."""
        if self.rank not in self.reads:
            return (NONE,) * len(self.ranks), NONE
        rows, place = _distinct(self.wanted)
        shard = self.made.places[0][rows].long()
        giver = torch.tensor(self.source.ranks)[shard * self.source.copies]  # the first peer that holds the row
        if self.rank in self.holds:
            giver[shard == self.holds[self.rank]] = self.rank
        giver = torch.searchsorted(torch.tensor(self.ranks), giver)
        by_giver = torch.argsort(giver, stable=True)
        came = torch.empty_like(by_giver)
        came[by_giver] = torch.arange(len(by_giver))
        counts = torch.bincount(giver, minlength=len(self.ranks)).tolist()
        return tuple(rows[by_giver].split(counts)), came[place]

    def sends(self) -> tuple[Tensor, ...]:
        """`Route.sends`: for each taker the rows that it lacks, in the order in which it reads them first."""
        if self.rank not in self.holds:
            return (NONE,) * len(self.ranks)
        mine, position = self.holds[self.rank], self.position
        if position is None:
            readers, index = self.made.shards[mine], torch.arange(len(self.made.shards[mine]))
        else:
            readers = (self.made.places[0][position] == mine).nonzero()[:, 0]
            index = self.made.places[1][position[readers]].long()
        shard, place = (each[readers].long() for each in self.read.places)
        in_order = torch.argsort(place)
        in_order = in_order[torch.argsort(shard[in_order], stable=True)]
        of_shard = index[in_order].split(torch.bincount(shard, minlength=len(self.read.shards)).tolist())
        publishes = self.source.publishes(self.rank)

        def rows_for(taker: int) -> Tensor:
            if taker not in self.reads:
                return NONE
            has_them = self.holds.get(taker) == mine
            if taker != self.rank and (has_them or not publishes):
                return NONE
            rows = of_shard[self.reads[taker]]
            return rows if position is None else _distinct(rows)[0]

        return tuple(rows_for(taker) for taker in self.ranks)

    def some_reader_lacks_rows(self) -> bool:
        """Whether some reader lacks a row, where all readers hold rows."""
        held = [{self.holds.get(peer, -1) for peer in self.target.peers(shard)} for shard in range(self.target.shards)]
        only = torch.tensor([next(iter(shards)) if len(shards) == 1 else -1 for shards in held], dtype=torch.int32)
        shard = self.made.places[0] if self.position is None else self.made.places[0][self.position]
        return bool((only[self.read.places[0].long()] != shard).any())


def _distinct(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct entries in the order of their first occurrence, and for each entry its place among them."""
    values, place = torch.unique(rows, return_inverse=True)
    first = torch.full_like(values, len(rows)).scatter_reduce_(0, place, torch.arange(len(rows)), "amin")
    by_first = torch.argsort(first)
    place_of = torch.empty_like(by_first)
    place_of[by_first] = torch.arange(len(by_first))
    return values[by_first], place_of[place]
