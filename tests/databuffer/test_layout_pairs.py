"""Every value from every layout of a family to every other, over real processes, against plain indexing."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from functools import cache

import pytest
import torch
import torch.distributed as dist

from rlflow.databuffer.balance import Balance
from rlflow.databuffer.buffer import DataBuffer
from rlflow.databuffer.rows import RowSpace
from rlflow.databuffer.transport import Transport
from rlflow.values.layout import Layout
from rlflow.values.not_sent import NotSent
from tests.databuffer.all_column_kinds import Everything, differences, everything
from tests.ranks import RankPool
from tests.slow import slow_but

# ranks and shards: one to four shards, on some ranks or all, held once or by two to four peers
PLACES = [
    ((0,), 1),
    ((2,), 1),
    ((0, 1), 2),
    ((0, 1), 1),
    ((2, 3), 2),
    ((0, 1, 2), 3),
    ((1, 2, 3), 3),
    ((1, 2, 3), 1),
    ((0, 1, 2, 3), 4),
    ((0, 1, 2, 3), 2),
    ((0, 1, 2, 3), 1),
]
FAMILY = [Layout(ranks, shards, shard_by) for ranks, shards in PLACES for shard_by in ("groups", "balanced")]  # type: ignore[arg-type]
LENGTHS = (3, 0, 9, 1, 1, 4, 0, 0, 7, 2, 5, 5, 8, 1)  # response tokens by id
GROUP_SIZE = 2
FREE = Balance(bytes_per_s=1e15)  # rows move for any gain


@dataclass(frozen=True)
class Brought:
    """The results of one exchange on one rank."""

    ids: list[int]
    wrong: list[str]
    texts: bool
    sent: int
    received: int


# ---- In plain Python: who holds what, and what must travel


def consecutive(groups: list[int], shards: int) -> list[list[int]]:
    """The ids of whole groups in order, each group where its middle falls."""
    of: list[list[int]] = [[] for _ in range(shards)]
    for place, group in enumerate(groups):
        of[(2 * place + 1) * shards // (2 * len(groups))] += [group * GROUP_SIZE + i for i in range(GROUP_SIZE)]
    return of


def dealt(layout: Layout, home: list[list[int]], ranks: tuple[int, ...]) -> list[list[int]]:
    """The ids of each shard, of rows that `home` holds by shard in whole groups on `ranks`."""
    shards = layout.shards
    if layout.shard_by == "groups":
        if shards == len(home):
            return home
        if layout.ranks == ranks and shards % len(home) == 0:  # each shard is shared out among its own ranks
            own = [sorted({i // GROUP_SIZE for i in held}) for held in home]
            return [ids for groups in own for ids in consecutive(groups, shards // len(home))]
        return consecutive(list(range(len(LENGTHS) // GROUP_SIZE)), shards)
    shares = [set[int]() for _ in range(shards)]
    groups = [{group * GROUP_SIZE + i for i in range(GROUP_SIZE)} for group in range(len(LENGTHS) // GROUP_SIZE)]
    for rows in sorted(groups, key=lambda rows: -cost(rows)):
        min(shares, key=cost).update(rows)
    while True:  # the richest gives the poorest what makes the larger of the two least
        rich, poor = max(shares, key=cost), min(shares, key=cost)
        given = [{i} for i in sorted(rich)] + [rows for rows in groups if rows <= rich]
        best = min(given, key=lambda rows: max(cost(rich - rows), cost(poor | rows)), default=set())
        if max(cost(rich - best), cost(poor | best)) >= cost(rich):
            break
        rich -= best
        poor |= best
    if shards == len(home) and max(cost(set(held)) for held in home) <= max(map(cost, shares)):
        return home  # nothing is gained
    return [[i for held in home for i in held if i in share] for share in shares]


def cost(rows: set[int]) -> int:
    """A response each, and a prompt of one token for all rows of a group."""
    return sum(LENGTHS[i] for i in rows) + len({i // GROUP_SIZE for i in rows})


def home_of(layout: Layout) -> list[list[int]]:
    """The ids of each shard where rows are made: groups dealt like cards, the last first."""
    groups = list(reversed(range(len(LENGTHS) // GROUP_SIZE)))
    return [
        [g * GROUP_SIZE + i for g in groups[s :: layout.shards] for i in range(GROUP_SIZE)]
        for s in range(layout.shards)
    ]


def row_bytes(i: int) -> int:
    """Bytes of row `i` of `Everything` on the wire, column by column, without its text, which is not sent."""
    question = {"id": i, "question": "wie viel? \U0001f642 \n" * (i % 3), "parts": [i, None, 0.1 * i]}
    per_token = 8 + 1 + 2 + 3 * 8
    parts = 2 * 4
    return (
        8
        + 1
        + 6 * 4
        + parts
        + per_token * LENGTHS[i]
        + 8 * (i % 5)
        + 2 * 2 * (i % 4)
        + len(json.dumps(question).encode())
    )


# ---- On the ranks


@cache
def transport() -> Transport:
    """This process's, with groups for any layouts."""
    made = Transport()
    ranks = range(made.world_size)
    made.form_groups(group for size in ranks for group in itertools.combinations(ranks, size) if size > 1)
    return made


@cache
def rows(ids: tuple[int, ...]) -> Everything:
    return everything(list(ids), dict(enumerate(LENGTHS)))


def space_of(source: Layout) -> RowSpace:
    """Rows made in the ranks and shards of `source`."""
    held = [torch.tensor(ids, dtype=torch.int64) for ids in home_of(source)]
    lengths = torch.tensor(LENGTHS)
    shards = [
        torch.stack([ids // GROUP_SIZE, ids, lengths[ids], lengths[ids] + 1, ids * 0, ids * 0 + 1]) for ids in held
    ]
    return RowSpace.of_shards("rollout", Layout(source.ranks, source.shards), shards).at(balance=FREE)


def bring_from(source: Layout) -> list[Brought | None]:
    """A value made in `source`, brought to each layout of the family in turn."""
    rank, space = dist.get_rank(), space_of(source)
    mine = space.path[:, -1][space.held(source, rank)].tolist()
    seen: list[Brought | None] = []
    for target in FAMILY:
        if rank not in {*source.ranks, *target.ranks} or target == source:
            seen.append(None)
            continue
        buffer = DataBuffer(transport())
        buffer.put("value", rows(tuple(mine)) if rank in source.ranks else None, Everything, space, source)
        buffer.issue("value", target)
        found = buffer.get("value", target) if rank in target.ranks else None
        buffer.free("value")
        ids = [] if found is None else found.ids.tolist()
        wrong = [] if found is None else differences(found, rows(tuple(ids)))
        texts = found is not None and not isinstance(found.texts, NotSent)
        seen.append(Brought(ids, wrong, texts, buffer.bytes_sent, buffer.bytes_received))
    return seen


@pytest.mark.parametrize("source", slow_but(FAMILY[::3], FAMILY), ids=str)
def test_every_layout_reaches_every_other_bit_by_bit_and_byte_by_byte(ranks4: RankPool, source: Layout) -> None:
    seen = ranks4.run(bring_from, source)
    home = home_of(source)
    made = dealt(source, home, source.ranks)
    held = {rank: made[source.shard(rank)] for rank in source.ranks}
    for number, target in enumerate(FAMILY):
        if target == source:
            continue
        read = dealt(target, home, source.ranks)
        lacks = {rank: [] for rank in range(4)} | {
            rank: [i for i in read[target.shard(rank)] if i not in held.get(rank, [])] for rank in target.ranks
        }
        for rank in target.ranks:
            found = seen[rank][number]
            assert found.ids == read[target.shard(rank)], f"rows of rank {rank} in {target}"
            assert found.wrong == [], f"columns of rank {rank} in {target}"
            assert found.texts == (found.ids == held.get(rank)), "only the very rows that were made have texts"
            assert found.received == sum(map(row_bytes, lacks[rank])), f"bytes to rank {rank} in {target}"
        for rank in source.ranks:
            takers = target.ranks if source.is_leader(rank) else ()
            gives = [row_bytes(i) for taker in takers for i in lacks[taker] if i in held[rank]]
            assert seen[rank][number].sent == sum(gives), f"bytes from rank {rank} to {target}"


def there_and_back() -> tuple[list[str], list[str]] | None:
    """Three shards, brought to two, put there as a value of its own, and brought back."""
    three, two = Layout((0, 1, 2), 3, "balanced"), Layout((0, 1), 2)
    rank, space, buffer = dist.get_rank(), space_of(three), DataBuffer(transport())
    if rank == 3:
        return None
    mine = rows(tuple(space.path[:, -1][space.held(three, rank)].tolist()))
    buffer.put("value", mine, Everything, space, three)
    buffer.issue("value", two)
    found = buffer.get("value", two) if rank in two.ranks else None
    buffer.put("again", found, Everything, space, two)
    buffer.issue("again", three)
    back = buffer.get("again", three)
    there = [] if found is None else differences(found, rows(tuple(found.ids.tolist())))
    return there, differences(back, mine)


def test_three_shards_to_two_and_back_change_no_bit(ranks4: RankPool) -> None:
    assert ranks4.run(there_and_back) == [([], [])] * 3 + [None]
