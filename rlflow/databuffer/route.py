"""Routes: the rows that each rank sends to each other rank when rows of one layout are read in another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rlflow.values.layout import Layout

NONE = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class Partition:
    """The rows that each shard holds.

    Attributes:
        shards: Positions of each shard's rows (indices into the arrays of their `RowSpace`), in the order
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


@dataclass(frozen=True, eq=False)
class Route:
    """Rows that one rank sends and receives when rows are read in `target`; the same for every value of these rows.

    A rank that holds a row and reads it gets it from itself. Other rows come from the first peer that holds them, each
    once, in the order in which they are read. A row that is read several times (a prompt, with each of its samples)
    comes once and is repeated. The sends and receives of other ranks are not computed.

    Attributes:
        rank: A rank of either layout.
        source: Layout in which the rows were made.
        target: Layout in which they are read.
        made: The rows in `source`.
        read: The rows with which they are read, in `target`.
        position: For each row in `read`, the row in `made` that is read with it; None where they are the same rows.
    """

    rank: int
    source: Layout
    target: Layout
    made: Partition
    read: Partition
    position: Tensor | None = None

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part: those of both layouts, ascending."""
        return tuple(sorted({*self.source.ranks, *self.target.ranks}))

    @property
    def metadata_source(self) -> int:
        """The rank that sends dtypes of columns, and scalars, to `receive_only`."""
        return self.source.ranks[0]

    @property
    def receive_only(self) -> tuple[int, ...]:
        """Ranks that read rows and have made none."""
        return tuple(sorted({*self.target.ranks} - {*self.source.ranks}))

    @cached_property
    def moves(self) -> bool:
        """Whether any rank sends anything to another."""
        return bool(self.receive_only) or self._some_reader_lacks_rows()

    @cached_property
    def same(self) -> bool:
        """Whether this rank reads just the rows that it holds, in their order; then it sends itself none."""
        return self.rank in self._holds and torch.equal(self._wanted, self.made.shards[self._holds[self.rank]])

    @cached_property
    def receives(self) -> tuple[Tensor, ...]:
        """For each of `ranks`, this one included, the rows that this rank gets from it: positions in the row space."""
        return self._needed(self._received[0])

    @cached_property
    def order(self) -> Tensor:
        """For each row that this rank reads, its place among the rows received."""
        return self._received[1]

    @cached_property
    def sends(self) -> tuple[Tensor, ...]:
        """For each of `ranks`, this one included, the rows that this rank sends: indices into the rows that it holds.

        They are in the order in which the receiver first reads them.
        """
        if self.rank not in self._holds:
            return (NONE,) * len(self.ranks)
        mine, position = self._holds[self.rank], self.position
        if position is None:
            readers, index = self.made.shards[mine], torch.arange(len(self.made.shards[mine]))
        else:
            readers = (self.made.places[0][position] == mine).nonzero()[:, 0]
            index = self.made.places[1][position[readers]].long()
        shard, place = (each[readers].long() for each in self.read.places)
        in_order = torch.argsort(place)
        in_order = in_order[torch.argsort(shard[in_order], stable=True)]
        of_shard = index[in_order].split(torch.bincount(shard, minlength=len(self.read.shards)).tolist())
        leads = self.source.is_leader(self.rank)

        def rows_for(taker: int) -> Tensor:
            if taker not in self._reads:
                return NONE
            has_them = self._holds.get(taker) == mine
            if taker != self.rank and (has_them or not leads):
                return NONE
            rows = of_shard[self._reads[taker]]
            return rows if position is None else _distinct(rows)[0]

        return self._needed(tuple(rows_for(taker) for taker in self.ranks))

    @cached_property
    def _holds(self) -> dict[int, int]:
        """The shard of each rank that made rows."""
        return {holder: place // self.source.copies for place, holder in enumerate(self.source.ranks)}

    @cached_property
    def _reads(self) -> dict[int, int]:
        """The shard of each rank that reads rows."""
        return {reader: place // self.target.copies for place, reader in enumerate(self.target.ranks)}

    @cached_property
    def _wanted(self) -> Tensor:
        """The rows that this rank reads, as positions among those made; none where it does not read."""
        if self.rank not in self._reads:
            return NONE
        rows = self.read.shards[self._reads[self.rank]]
        return rows if self.position is None else self.position[rows]

    @cached_property
    def _received(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """For each of `ranks` the rows that come from it, and `order`."""
        if self.rank not in self._reads:
            return (NONE,) * len(self.ranks), NONE
        rows, place = _distinct(self._wanted)
        shard = self.made.places[0][rows].long()
        giver = torch.tensor(self.source.ranks)[shard * self.source.copies]  # the first peer that holds the row
        if self.rank in self._holds:
            giver[shard == self._holds[self.rank]] = self.rank
        giver = torch.searchsorted(torch.tensor(self.ranks), giver)
        by_giver = torch.argsort(giver, stable=True)
        came = torch.empty_like(by_giver)
        came[by_giver] = torch.arange(len(by_giver))
        counts = torch.bincount(giver, minlength=len(self.ranks)).tolist()
        return tuple(rows[by_giver].split(counts)), came[place]

    def _needed(self, of_ranks: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The rows to or from each rank, without rows to itself where this rank reads just the rows that it holds."""
        if not self.same:
            return of_ranks
        return tuple(NONE if other == self.rank else rows for other, rows in zip(self.ranks, of_ranks, strict=True))

    def _some_reader_lacks_rows(self) -> bool:
        """Whether some reader lacks a row, where all readers hold rows."""
        held = [{self._holds.get(peer, -1) for peer in self.target.peers(shard)} for shard in range(self.target.shards)]
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
