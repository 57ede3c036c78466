"""Groups in a checkpoint, as safetensors and JSON: a filter's surplus, unfinished responses, steps generated ahead.

    surplus.json                        the rows of each space, and the layouts of rows and values
    surplus-00000-of-00002.safetensors  rank 0's rows of tensors: `<value>/<column>`
    surplus-00000-of-00002.json         rank 0's texts and dataset rows, and the device type of each tensor

Unfinished responses are written in the same form under the name `unfinished`, step 7 as `step-00000007`. If layouts are
the same when groups are read, every rank gets the rows that it wrote; otherwise groups are distributed again.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlflow.databuffer.balance import group_partition
from rlflow.databuffer.groups import Groups, GroupValue
from rlflow.databuffer.route import Partition
from rlflow.databuffer.rows import NUMBERS, RowSpace
from rlflow.databuffer.wire import stacked, unstacked
from rlflow.errors import UserError
from rlflow.storage.draft import of_rank
from rlflow.values.column_kinds import ColumnKind
from rlflow.values.columns import columns, join_rows, take_rows, with_path
from rlflow.values.layout import Layout
from rlflow.values.not_sent import NotSent
from rlflow.values.ragged import Ragged

SURPLUS = "surplus"
UNFINISHED = "unfinished"  # groups with responses that were cut off
LENGTHS = "lengths"  # key of the lengths of a ragged column, after the column's name
NAMES = "names"  # key of the names of a column's parts, after the column's name


def step_name(step: int) -> str:
    """The name of the groups of a step that was generated and not yet trained: `step-00000007`."""
    return f"step-{step:08d}"


def write_groups(folder: Path, name: str, groups: Groups, world_size: int) -> list[str]:
    """Write this rank's rows of `groups`; called by every rank that has them. One of these writes `<name>.json`, too.

    Args:
        folder: The checkpoint's folder.
        name: Beginning of the file names: `surplus`.
        groups: The groups, as this rank holds them.
        world_size: Number of ranks, for the names of files.

    Returns:
        The names of the files that this rank wrote.
    """
    written = write_rows(folder, name, groups, world_size)
    if groups.rank == min(rank for space in groups.spaces.values() for rank in space.origin[0].ranks):
        (folder / f"{name}.json").write_text(json.dumps(described(groups, world_size)))
        written.append(f"{name}.json")
    return written


def described(groups: Groups, world_size: int) -> dict[str, Any]:
    """The content of `<name>.json`, the same on all ranks: the rows of each space, and the layouts of the values.

    Two samples of the prompt 4, both on the first of two shards:

        {"ranks": 2,
         "spaces": {"rollout": {"path": [[4, 0], [4, 1]], "lengths": [12, 3], ..., "dealt": [[layout, [[0, 1], []]]]}},
         "values": {"rewards": {"space": "rollout", "layout": {"ranks": [0, 1], "shards": 2, ...}}}}
    """
    spaces = {of: _space_to_json(space, groups.layouts(of)) for of, space in groups.spaces.items()}
    values = {of: {"space": value.space, "layout": asdict(value.layout)} for of, value in groups.values.items()}
    return {"ranks": world_size, "spaces": spaces, "values": values}


def write_rows(folder: Path, name: str, groups: Groups, world_size: int) -> list[str]:
    """Write this rank's `.safetensors` and `.json`, without `<name>.json`; returns the names of the two files."""
    tensors: dict[str, Tensor] = {}
    lists: dict[str, list[Any]] = {}
    for value_name, value in groups.values.items():
        for key, data in _columns(value_name, value):
            if isinstance(data, Tensor):
                tensors[key] = data
            elif isinstance(data, dict):
                tensors[key], lists[f"{key}/{NAMES}"] = stacked(data), sorted(data)
            elif isinstance(data, Ragged):
                tensors |= {key: data.values, f"{key}/{LENGTHS}": data.lengths}
            elif not isinstance(data, NotSent):
                lists[key] = data
    path = folder / of_rank(name, groups.rank, world_size)
    save_file({key: tensor.cpu().contiguous().clone() for key, tensor in tensors.items()}, f"{path}.safetensors")
    devices = {key: tensor.device.type for key, tensor in tensors.items()}
    Path(f"{path}.json").write_text(json.dumps({"lists": lists, "devices": devices}))
    return [f"{path.name}.safetensors", f"{path.name}.json"]


def read_groups(folder: Path, name: str, like: Groups, device: torch.device) -> Groups | None:
    """Read what `write_groups` wrote under this name, in the layouts of this run; None if nothing was written.

    Called by every rank that has such groups, without communication; each reads the files that it needs.

    Args:
        folder: The checkpoint's folder.
        name: Beginning of the file names: `surplus`.
        like: The spaces and values of this run, without rows.
        device: The device for tensors that were not on the CPU when they were written.

    Raises:
        UserError: The stored groups have other values or row spaces than this run.
    """
    if not (folder / f"{name}.json").is_file():
        return None
    stored = json.loads((folder / f"{name}.json").read_text())
    if stored["values"].keys() != like.values.keys() or stored["spaces"].keys() != like.spaces.keys():
        raise UserError(
            f"{folder} has groups waiting for a later step, with the values {', '.join(stored['values']) or 'none'};"
            f" this run keeps {', '.join(like.values) or 'none'}. Continue with the same algorithm and `placement`"
        )
    return read_rows(folder, name, stored, like, device)


def read_rows(folder: Path, name: str, stored: dict[str, Any], like: Groups, device: torch.device) -> Groups:
    """Like `read_groups`, where the content of `<name>.json` has been read already: `stored`, from `described`."""
    dealt = {name: _dealt(space) for name, space in stored["spaces"].items()}
    same = all(list(dealt[name]) == like.layouts(name) for name in like.spaces)
    spaces = {
        name: _space_from_json(like.spaces[name], space, dealt[name] if same else None, like.layouts(name))
        for name, space in stored["spaces"].items()
    }

    @cache
    def written(rank: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        path = folder / of_rank(name, rank, stored["ranks"])
        return load_file(f"{path}.safetensors"), json.loads(Path(f"{path}.json").read_text())

    values = {}
    for value_name, value in like.values.items():
        of = stored["values"][value_name]
        before = _layout(of["layout"])
        if like.rank not in value.layout.ranks:
            rows = None
        elif same:
            rows = _rows(*written(like.rank), value_name, value, device)
        else:
            shards = dealt[value.space][before].shards
            wrote = [before.peers(shard)[0] for shard in range(before.shards)]
            parts = [_rows(*written(rank), value_name, value, device) for rank in wrote]
            place = torch.cat(shards).argsort()  # place of each stored row in the joined parts
            held = spaces[value.space].held(value.layout, like.rank)
            rows = take_rows(join_rows(parts, value.annotation), value.annotation, place[held])
        if rows is not None:
            space = spaces[value.space]
            rows = with_path(rows, value.annotation, space.paths(space.held(value.layout, like.rank)), device)
        values[value_name] = replace(value, rows=rows)
    return Groups(like.rank, spaces, values).trimmed()


def of_ranks(stored: dict[str, Any], ranks: Collection[int]) -> dict[str, Any]:
    """The description `stored` reduced to the rows that `ranks` hold; each space must lie in exactly one layout."""
    spaces, layouts = {}, {}
    for name, space in stored["spaces"].items():
        ((stored_layout, shards),) = space["dealt"]
        before = _layout(stored_layout)
        firsts = {before.shard(rank): rank for rank in sorted(ranks, reverse=True) if rank in before.ranks}
        held = sorted(row for shard in firsts for row in shards[shard])
        place = {row: new for new, row in enumerate(held)}
        now = replace(before, ranks=tuple(firsts[shard] for shard in sorted(firsts)), shards=len(firsts))
        dealt = [asdict(now), [[place[row] for row in shards[shard]] for shard in sorted(firsts)]]
        arrays = {key: [rows[row] for row in held] for key, rows in space.items() if key != "dealt"}
        spaces[name], layouts[name] = {**arrays, "dealt": [dealt]}, asdict(now)
    values = {name: {**value, "layout": layouts[value["space"]]} for name, value in stored["values"].items()}
    return {**stored, "spaces": spaces, "values": values}


def _columns(name: str, value: GroupValue) -> Iterator[tuple[str, Any]]:
    """Name (`<value>/<column>`) and data of each column of this rank's rows; nothing if it has no rows of the value."""
    for column in columns(value.annotation) if value.rows is not None else ():
        if column.kind is not ColumnKind.PATH:  # paths are stored with the space
            yield f"{name}/{column.name}", column.of(value.rows)


def _rows(
    tensors: dict[str, Tensor], described: dict[str, Any], name: str, value: GroupValue, device: torch.device
) -> Any:
    """The rows of the value `name` in the two files of a rank; a column that was not written is `NotSent`."""

    def tensor(key: str) -> Tensor:
        return tensors[key] if described["devices"][key] == "cpu" else tensors[key].to(device)

    def data(column: str, kind: ColumnKind) -> Any:
        key, lists = f"{name}/{column}", described["lists"]
        if key not in tensors and key not in lists:
            return NotSent(column)
        if kind is ColumnKind.JSON:
            return lists[key]
        if kind is ColumnKind.PARTS:
            return unstacked(tensor(key), lists[f"{key}/{NAMES}"])
        return Ragged(tensor(key), tensor(f"{key}/{LENGTHS}")) if kind is ColumnKind.RAGGED else tensor(key)

    read = {column.name: data(column.name, column.kind) for column in columns(value.annotation)}
    return read[""] if "" in read else value.annotation(**read)


def _space_to_json(space: RowSpace, layouts: list[Layout]) -> dict[str, Any]:
    dealt = [[asdict(layout), [rows.tolist() for rows in space.partition(layout).shards]] for layout in layouts]
    return {**{name: array.tolist() for name, array in space.arrays.items()}, "dealt": dealt}


def _dealt(space: dict[str, Any]) -> dict[Layout, Partition]:
    return {
        _layout(layout): Partition(tuple(torch.tensor(rows, dtype=torch.int64) for rows in shards))
        for layout, shards in space["dealt"]
    }


def _space_from_json(
    like: RowSpace, stored: dict[str, Any], dealt: dict[Layout, Partition] | None, layouts: list[Layout]
) -> RowSpace:
    """The stored rows as a space with the partitions `dealt`; if that is None, whole groups are dealt to `layouts`."""
    arrays = {name: torch.tensor(stored[name], dtype=torch.int64) for name in ("path", *NUMBERS)}
    arrays["path"] = arrays["path"].view(-1, like.path.shape[1])  # an empty list has lost the width
    arrays["dropped"] = torch.tensor(stored["dropped"], dtype=torch.bool)
    made_in = like.origin[0]
    if dealt is not None:
        return like.with_rows(arrays, dealt)
    placed = like.with_rows(arrays, {made_in: Partition(group_partition(arrays["path"][:, 0], made_in.shards))})
    return like.with_rows(arrays, {layout: placed.partition(layout) for layout in layouts})


def _layout(stored: dict[str, Any]) -> Layout:
    return Layout(**{**stored, "ranks": tuple(stored["ranks"])})
