"""The state of a role in a checkpoint's files: an index of its parts, and reading of ranges."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from rlflow.errors import UserError, one_line
from rlflow.storage.safetensors_files import TensorFile


@dataclass(frozen=True)
class RoleIndex:
    """The content of `<role>.json`: which file has which range of each tensor of a role. For two ranks:

        files   ["actor-00000-of-00002.safetensors", "actor-00001-of-00002.safetensors"]
        kinds   ["weight", "exp_avg", "exp_avg_sq"]
        shapes  {"lm_head.weight": [100, 8]}
        ranges  {"lm_head.weight": [(0, 400, 0), (400, 400, 1)]}       elements 0 to 399 are in the first file

    Attributes:
        updates: Number of optimizer updates that the role has made.
        untrained: Facts that the state needs and does not contain, such as the model under adapters.
        kinds: Names of the tensors of each parameter: `weight`, and those of the optimizer, such as `exp_avg`.
        files: Files with tensors, one for each rank that holds some.
        shapes: Shape of each parameter.
        ranges: Ranges that make up the flattened tensor, by parameter, in order, the same for every kind: the first
            element, the number of elements, and the place in `files` of the file that has them. A block of rows and
            columns has a fourth number, its columns; the file has it row by row.
        loss_scale: Factor of the loss and the updates since it changed; None if the role's loss is not scaled.
    """

    updates: int
    untrained: dict[str, Any]
    kinds: list[str]
    files: list[str]
    shapes: dict[str, list[int]]
    ranges: dict[str, list[tuple[int, ...]]]
    loss_scale: tuple[float, int] | None = None

    def write(self, path: Path) -> None:
        """Write the index as JSON."""
        path.write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, path: Path) -> RoleIndex:
        """The index that `write` wrote."""
        return cls(**json.loads(path.read_text()))


def index_name(role: str) -> str:
    """The name of the file that holds a role's `RoleIndex`: `actor.json`."""
    return f"{role}.json"


class StoredRole:
    """One role's state in a checkpoint or a draft, read range by range.

    Files are opened when they are first read and then stay open; only the ranges asked for are read.
    """

    def __init__(self, folder: Path, role: str, index: RoleIndex) -> None:
        self._folder, self._role, self._index = folder, role, index
        self._files: dict[str, TensorFile] = {}  # open files by name

    def require(self, shapes: dict[str, torch.Size], kinds: Iterable[str] | None) -> None:
        """Refuse a state of another model or optimizer, before anything is read.

        Args:
            shapes: Shapes of the trained parameters by Hugging Face name.
            kinds: Names of the tensors that each parameter needs: `weight`, and the optimizer's, such as `exp_avg`;
                None for any.

        Raises:
            UserError: A parameter is missing from the checkpoint or has another shape, or the checkpoint has a further
                parameter or other tensors of the optimizer.
        """
        stored, where = self._index.shapes, self._folder / index_name(self._role)
        for parameter, shape in shapes.items():
            if parameter not in stored:
                raise UserError(
                    f"{where} has no `{parameter}` of role `{self._role}`, which this run trains; continue with the"
                    " same `model`"
                )
            if stored[parameter] != list(shape):
                raise UserError(
                    f"`{parameter}` of role `{self._role}` is {stored[parameter]} in {where} and"
                    f" {list(shape)} in this run; continue with the same `model`"
                )
        if more := stored.keys() - shapes.keys():
            raise UserError(
                f"{where} has `{min(more)}` of role `{self._role}`, which this run does not train; continue with the"
                " same `model`"
            )
        if kinds is not None and {*self._index.kinds} != {*kinds}:
            raise UserError(
                f"role `{self._role}`: {where} has {', '.join(self._index.kinds)} of each weight, and this run's"
                f" optimizer keeps {', '.join(kinds)}; continue with the same `optimizer`"
            )

    def read(self, parameter: str, kind: str, start: int, length: int) -> Tensor:
        """A range of a flattened tensor, `[length]` on the CPU, put together from the files that have parts of it.

        Raises:
            OSError: A file is missing or damaged; the error has its name.
        """
        ranges, end = self._index.ranges[parameter], start + length
        if any(len(part) > 3 for part in ranges):
            return self._of_blocks(parameter, kind, start, end)
        found: list[Tensor] = []
        place = max(0, bisect_right(ranges, start, key=lambda part: part[0]) - 1)
        for first, count, file, *_ in ranges[place:]:
            if first >= end:
                break
            low, high = max(start, first), min(end, first + count)
            if low < high:
                name = self._index.files[file]
                found.append(self._part(name, f"{parameter}/{kind}", low - first, high - first))
        whole = found[0] if len(found) == 1 else torch.cat([*found, torch.empty(0)])
        assert len(whole) == length, (parameter, kind, start, length)
        return whole

    def _of_blocks(self, parameter: str, kind: str, start: int, end: int) -> Tensor:
        """Like `read`, for a tensor that is stored in blocks: the rows with these elements are put together first."""
        width = prod(self._index.shapes[parameter][1:])
        top, bottom = start // width, -(-end // width)
        rows = torch.full((bottom - top, width), torch.nan)
        for first, count, file, columns in self._index.ranges[parameter]:
            row, column = divmod(first, width)
            low, high = max(top, row), min(bottom, row + count // columns)
            if low < high:
                own = (low - row) * columns, (high - row) * columns
                part = self._part(self._index.files[file], f"{parameter}/{kind}", *own)
                rows = rows.to(part.dtype)  # float64 of a run in float64
                rows[low - top : high - top, column : column + columns] = part.view(-1, columns)
        return rows.view(-1)[start - top * width : end - top * width]

    def _part(self, name: str, key: str, start: int, end: int) -> Tensor:
        try:
            return self._open(name).read(key, start, end - start)
        except (SafetensorError, KeyError) as error:
            raise OSError(f"{self._folder / name} is damaged ({one_line(error)})") from error

    def _open(self, name: str) -> TensorFile:
        if name not in self._files:
            self._files[name] = TensorFile(self._folder / name)
        return self._files[name]
