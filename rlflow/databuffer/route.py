"""Which rows go from whom to whom when the rows of one layout are read in another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.databuffer.partition import Partition
from rlflow.values.layout import Layout

NONE = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class Route:
    """The ways of a row space's rows, seen from one rank; the same for every value of the space.

    A rank that holds a row and reads it has it from itself. Other rows come from the first peer that holds them, each
    once, in the order in which they are read. A row that is read several times (a prompt, beside its samples) comes
    once and is repeated.

    Attributes:
        ranks: Who takes part: the ranks of both layouts, ascending.
        introducer: The one of them that tells newcomers the columns' dtypes.
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
        ranks = tuple(sorted({*source.ranks, *target.ranks}))
        newcomers = tuple(sorted({*target.ranks} - {*source.ranks}))
        holds = {holder: place // source.copies for place, holder in enumerate(source.ranks)}
        reads = {reader: place // target.copies for place, reader in enumerate(target.ranks)}
        receives, order = _receives(rank, ranks, source, holds, reads, made, read, position)
        sends = _sends(rank, ranks, source, holds, reads, made, read, position)
        here = _positions(read.shards[reads[rank]] if rank in reads else NONE, position)
        same = rank in holds and torch.equal(here, made.shards[holds[rank]])
        if same:
            receives, sends = (
                tuple(NONE if other == rank else way for other, way in zip(ranks, ways, strict=True))
                for ways in (receives, sends)
            )
        return cls(
            ranks=ranks,
            introducer=source.ranks[0],
            newcomers=newcomers,
            sends=sends,
            receives=receives,
            order=order,
            same=same,
            moves=bool(newcomers) or _any_moves(target, holds, made, read, position),
        )


def _positions(rows: Tensor, position: Tensor | None) -> Tensor:
    return rows if position is None else position[rows]


def _receives(
    rank: int,
    ranks: tuple[int, ...],
    source: Layout,
    holds: dict[int, int],
    reads: dict[int, int],
    made: Partition,
    read: Partition,
    position: Tensor | None,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """`Route.receives` and `Route.order`."""
    if rank not in reads:
        return (NONE,) * len(ranks), NONE
    wanted = _positions(read.shards[reads[rank]], position)
    rows, place = _distinct(wanted)
    shard = made.places[0][rows].long()
    giver = torch.tensor(source.ranks)[shard * source.copies]  # the first peer that holds the row
    if rank in holds:
        giver[shard == holds[rank]] = rank
    giver = torch.searchsorted(torch.tensor(ranks), giver)
    by_giver = torch.argsort(giver, stable=True)
    came = torch.empty_like(by_giver)
    came[by_giver] = torch.arange(len(by_giver))
    counts = torch.bincount(giver, minlength=len(ranks)).tolist()
    return tuple(rows[by_giver].split(counts)), came[place]


def _sends(
    rank: int,
    ranks: tuple[int, ...],
    source: Layout,
    holds: dict[int, int],
    reads: dict[int, int],
    made: Partition,
    read: Partition,
    position: Tensor | None,
) -> tuple[Tensor, ...]:
    """`Route.sends`: for each taker the rows that it lacks, in the order in which it reads them first."""
    if rank not in holds:
        return (NONE,) * len(ranks)
    mine = holds[rank]
    if position is None:
        readers, index = made.shards[mine], torch.arange(len(made.shards[mine]))
    else:
        readers = (made.places[0][position] == mine).nonzero()[:, 0]
        index = made.places[1][position[readers]].long()
    shard, place = (each[readers].long() for each in read.places)
    in_order = torch.argsort(place)
    in_order = in_order[torch.argsort(shard[in_order], stable=True)]
    of_shard = index[in_order].split(torch.bincount(shard, minlength=len(read.shards)).tolist())
    publishes = source.publishes(rank)

    def rows_for(taker: int) -> Tensor:
        if taker not in reads:
            return NONE
        has_them = holds.get(taker) == mine
        if taker != rank and (has_them or not publishes):
            return NONE
        rows = of_shard[reads[taker]]
        return rows if position is None else _distinct(rows)[0]

    return tuple(rows_for(taker) for taker in ranks)


def _distinct(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct entries in the order of their first occurrence, and for each entry its place among them."""
    values, place = torch.unique(rows, return_inverse=True)
    first = torch.full_like(values, len(rows)).scatter_reduce_(0, place, torch.arange(len(rows)), "amin")
    by_first = torch.argsort(first)
    place_of = torch.empty_like(by_first)
    place_of[by_first] = torch.arange(len(by_first))
    return values[by_first], place_of[place]


def _any_moves(
    target: Layout, holds: dict[int, int], made: Partition, read: Partition, position: Tensor | None
) -> bool:
    """Whether some reader lacks a row, where all readers hold rows."""
    held = [{holds.get(peer, -1) for peer in target.peers(shard)} for shard in range(target.shards)]
    only = torch.tensor([next(iter(shards)) if len(shards) == 1 else -1 for shards in held], dtype=torch.int32)
    shard = made.places[0] if position is None else made.places[0][position]
    return bool((only[read.places[0].long()] != shard).any())
