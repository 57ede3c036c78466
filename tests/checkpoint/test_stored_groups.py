"""A surplus comes back from a checkpoint as it was, or dealt anew to another number of ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlflow.checkpoint.stored_groups import SURPLUS, read_groups, write_groups
from rlflow.databuffer.groups import Groups
from rlflow.databuffer.rows import NUMBERS, RowSpace
from rlflow.errors import UserError
from rlflow.values.layout import Layout
from rlflow.values.not_sent import NotSent
from tests.databuffer.test_groups import BALANCED, HOME, RANKS, Value, drawn, same, value

CPU = torch.device("cpu")
KEEPS = torch.tensor([1, 4, 6, 7, 11])


def surplus(rank: int) -> Groups:
    """A surplus of two draws of six prompts."""
    return Groups.joined([drawn(rank, number, 6).only(KEEPS) for number in (0, 1)])


def empty(rank: int, home: Layout, balanced: Layout) -> Groups:
    """The groups of a run in these layouts, without rows."""
    none = torch.empty(0, dtype=torch.int64)
    kept = surplus(rank)
    layouts = {"made": home, "scored": balanced}
    values = {name: replace(kept.values[name], layout=layout, rows=None) for name, layout in layouts.items()}
    space = RowSpace.of_shards("rollout", home, [none.view(2 + len(NUMBERS), 0)] * home.shards)
    return Groups(rank, {"rollout": space}, values)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for rank in RANKS:
        write_groups(tmp_path, SURPLUS, surplus(rank), len(RANKS))
    return tmp_path


@pytest.mark.parametrize("rank", RANKS)
def test_as_many_ranks_read_what_they_wrote(rank: int, folder: Path) -> None:
    expected, found = surplus(rank), read_groups(folder, SURPLUS, empty(rank, HOME, BALANCED), CPU)
    assert found is not None
    for array in ("path", *NUMBERS):
        assert torch.equal(getattr(found.spaces["rollout"], array), getattr(expected.spaces["rollout"], array))
    for name, layout in {"made": HOME, "scored": BALANCED}.items():
        space = found.spaces["rollout"]
        assert space.held(layout, rank).tolist() == expected.spaces["rollout"].held(layout, rank).tolist()
        assert same(found.values[name].rows, expected.values[name].rows)


def test_other_ranks_get_whole_groups_and_every_row_once(folder: Path) -> None:
    home, balanced = Layout((0, 1), 2), Layout((0, 1), 2, "balanced")
    held: dict[str, list[int]] = {"made": [], "scored": []}
    for rank in (0, 1):
        found = read_groups(folder, SURPLUS, empty(rank, home, balanced), CPU)
        assert found is not None
        space = found.spaces["rollout"]
        for name, layout in {"made": home, "scored": balanced}.items():
            ids = space.path[:, -1][space.held(layout, rank)].tolist()
            assert same(found.values[name].rows, value(ids))
            held[name] += ids
        assert space.versions.tolist() == surplus(0).spaces["rollout"].versions.tolist()
    assert [group for group in KEEPS.tolist() for _ in range(2)] == [row // 2 for row in held["made"]]
    assert sorted(held["scored"]) == sorted(held["made"])


def test_a_surplus_is_safetensors_and_json(folder: Path) -> None:
    parts = [f"surplus-{rank:05d}-of-00003.{kind}" for rank in RANKS for kind in ("json", "safetensors")]
    assert sorted(path.name for path in folder.iterdir()) == [*parts, "surplus.json"]
    assert json.loads((folder / parts[0]).read_text())["lists"]["made/texts"] == surplus(0).values["made"].rows.texts


def test_a_surplus_of_other_values_is_refused(folder: Path) -> None:
    like = empty(0, HOME, BALANCED)
    other = replace(like, values={"made": like.values["made"], "rewards": like.values["scored"]})
    told = r"has groups waiting for a later step, with the values made, scored; this run keeps made, rewards\."
    with pytest.raises(UserError, match=told):
        read_groups(folder, SURPLUS, other, CPU)
    with pytest.raises(UserError, match=r"this run keeps none\. Continue with the same algorithm and `placement`"):
        read_groups(folder, SURPLUS, Groups(0, {}, {}), CPU)


def test_a_checkpoint_without_a_surplus_has_none(tmp_path: Path) -> None:
    assert read_groups(tmp_path, SURPLUS, empty(0, HOME, BALANCED), CPU) is None


def test_a_column_that_was_not_sent_is_not_sent_after_a_checkpoint_either(tmp_path: Path) -> None:
    for rank in RANKS:
        kept = surplus(rank)
        away = {name: replace(of, rows=replace(of.rows, texts=NotSent("texts"))) for name, of in kept.values.items()}
        write_groups(tmp_path, SURPLUS, replace(kept, values=away), len(RANKS))
    found = read_groups(tmp_path, SURPLUS, empty(1, HOME, BALANCED), CPU)
    assert found is not None
    assert isinstance(found.values["made"].rows, Value)
    assert isinstance(found.values["made"].rows.texts, NotSent)
