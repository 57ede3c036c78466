"""Groups that a filter keeps are chosen and joined where they were made."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Annotated

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow.databuffer.groups import Groups, GroupValue
from rlflow.databuffer.rows import RowSpace
from rlflow.values.column_kinds import ColumnKind, OnDemand, PerSample, PerToken
from rlflow.values.columns import Parts
from rlflow.values.layout import Layout
from rlflow.values.ragged import Ragged

GROUP = 2  # samples of a prompt
RANKS = (0, 1, 2)
HOME = Layout(RANKS, 3)
BALANCED = Layout(RANKS, 3, "balanced")


@dataclass(frozen=True)
class Value:
    """Columns of every cut that rows have, each row made from its id."""

    ids: PerSample
    parts: dict[str, PerSample]
    response: PerToken
    prompt: Ragged
    texts: Annotated[list[str], ColumnKind.JSON, OnDemand]


def length(row: int) -> int:
    return row * 7 % 5


def value(ids: list[int]) -> Value:
    """A value as a node makes it: as wide as its longest response."""
    widest = max(map(length, ids), default=0)
    rows = [[row] * length(row) + [0] * (widest - length(row)) for row in ids]
    return Value(
        torch.tensor(ids, dtype=torch.int64),
        Parts(right=torch.tensor([row / 7 for row in ids]), length=torch.tensor([float(row) for row in ids])),
        torch.tensor(rows, dtype=torch.int64).view(len(ids), widest),
        Ragged.from_lists([[row] * (row % 3) for row in ids]),
        [f"text {row}" for row in ids],
    )


def drawn(rank: int, number: int, prompts: int) -> Groups:
    """All of a draw: samples of prompts, made in whole groups, with a value made there and one made balanced."""
    groups = torch.arange(prompts) + number * prompts
    ids = torch.cat([groups * GROUP + index for index in range(GROUP)]).sort().values
    cuts = [len(ids) // GROUP * shard // 3 * GROUP for shard in range(4)]
    shards = []
    for start, end in pairwise(cuts):
        own = ids[start:end]
        lengths = torch.tensor([length(row) for row in own.tolist()], dtype=torch.int64)
        shards.append(torch.stack([own // GROUP, own, lengths, lengths + 1, own * 0 + number, own * 0 + 1]))
    space = RowSpace.of_shards("rollout", HOME, shards).at(step=number)
    values = {
        name: GroupValue(Value, "rollout", layout, value(space.path[space.held(layout, rank), -1].tolist()))
        for name, layout in {"made": HOME, "scored": BALANCED}.items()
    }
    return Groups(rank, {"rollout": space}, values)


def same(found: Value, expected: Value) -> bool:
    return (
        torch.equal(found.ids, expected.ids)
        and found.parts.keys() == expected.parts.keys()
        and all(torch.equal(found.parts[name], expected.parts[name]) for name in expected.parts)
        and torch.equal(found.response, expected.response)
        and torch.equal(found.prompt.values, expected.prompt.values)
        and found.texts == expected.texts
    )


@given(prompts=st.integers(1, 7), keeps=st.lists(st.sets(st.integers(0, 6)), min_size=1, max_size=4))
def test_groups_kept_of_several_draws_stay_on_the_rank_that_made_them(prompts: int, keeps: list[set[int]]) -> None:
    chosen = [
        sorted(place + number * prompts for place in keep if place < prompts) for number, keep in enumerate(keeps)
    ]
    held: dict[str, list[int]] = {"made": [], "scored": []}
    for rank in RANKS:
        draws = [drawn(rank, number, prompts) for number in range(len(keeps))]
        kept = Groups.joined([one.only(torch.tensor(groups)) for one, groups in zip(draws, chosen, strict=True)])
        space = kept.spaces["rollout"]
        assert kept.roots.tolist() == list(chain(*chosen))
        expected = [group * GROUP + index for group in chain(*chosen) for index in range(GROUP)]
        assert space.path[:, -1].tolist() == expected
        assert space.step == len(keeps) - 1
        for name, of_value in kept.values.items():
            ids = space.path[:, -1][space.held(of_value.layout, rank)].tolist()
            assert same(of_value.rows, value(ids))
            held[name] += ids
    assert all(sorted(ids) == space.path[:, -1].tolist() for ids in held.values())


def test_whole_groups_stay_whole_and_rows_of_each_draw_keep_their_version() -> None:
    parts = [drawn(0, number, 6).only(torch.tensor([1, 4, 6, 11])) for number in (0, 1)]
    space = Groups.joined(parts).spaces["rollout"]
    assert [space.roots[rows].tolist() for rows in space.partition(HOME).shards] == [[1, 1, 6, 6], [], [4, 4, 11, 11]]
    assert space.versions.tolist() == [0] * 4 + [1] * 4


def test_a_layout_that_made_nothing_is_dealt_again() -> None:
    parts = [drawn(0, number, 6).only(torch.tensor([0, 1, 6])) for number in (0, 1)]
    space = Groups.joined(parts).spaces["rollout"]
    assert [len(rows) for rows in space.partition(Layout((0, 1), 2)).shards] == [2, 4]


def test_prompts_and_samples_are_chosen_alike() -> None:
    one = drawn(0, 0, 3)
    shards = [torch.tensor([[group], [0], [1], [-1], [1]]) for group in range(3)]
    both = Groups(0, {"batch": RowSpace.of_shards("batch", HOME, shards), **one.spaces}, one.values)
    kept = both.only(torch.tensor([0, 2]))
    assert kept.spaces["batch"].roots.tolist() == [0, 2]
    assert kept.spaces["rollout"].roots.tolist() == [0, 0, 2, 2]
