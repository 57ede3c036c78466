"""A role's state read back, each rank the ranges that it holds."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlflow.errors import UserError, one_line
from rlflow.strategies.strategy import TrainingStrategy


@dataclass(frozen=True)
class RoleIndex:
    """Where a role's state lies in a checkpoint; what `<role>.json` holds.

    Attributes:
        updates: Updates that the role has made.
        untrained: What the state belongs to and does not hold.
        kinds: What there is of each parameter: `weight`, and what the optimizer keeps.
        files: Files with tensors, one of each rank that holds some.
        shapes: Shape of each parameter.
        ranges: By parameter, in order, the ranges that make up the flattened tensor, the same for every kind: the first
            element, the number of elements, and the place in `files` of the file that has them.
        loss_scale: Factor of the loss and the updates since it changed; None where the role has none.
    """

    updates: int
    untrained: dict[str, Any]
    kinds: list[str]
    files: list[str]
    shapes: dict[str, list[int]]
    ranges: dict[str, list[tuple[int, int, int]]]
    loss_scale: tuple[float, int] | None = None

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, path: Path) -> RoleIndex:
        """What `write` wrote."""
        return cls(**json.loads(path.read_text()))


def index_name(role: str) -> str:
    """Of the file that holds a role's `RoleIndex`."""
    return f"{role}.json"


def restore(folder: Path, strategy: TrainingStrategy, roles: Iterable[str]) -> None:
    """Bring every trained role of this rank to where it stood; called by all ranks.

    Args:
        folder: Of the checkpoint.
        strategy: Holds the roles.
        roles: All trained roles, those that live on other ranks too.

    Raises:
        UserError: The checkpoint lacks what a role needs, or was made with other adapters or on another model.
    """
    for role in filter(strategy.holds, roles):
        path = folder / index_name(role)
        if not path.is_file():
            raise UserError(
                f"{folder} has no state of `{role}`, which this run trains; continue with the same `module`"
            )
        index = RoleIndex.read(path)
        _require_same(role, found=strategy.roles[role].model.untrained_record(), stored=index.untrained)
        strategy.load_state_parts(role, Stored(folder, role, index), index.updates, index.loss_scale)


def _require_same(role: str, found: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Adapters fit to the model that they were trained on alone, and to none of another shape."""
    for key in sorted({*found, *stored}):
        if found.get(key) == stored.get(key):
            continue
        if not (found and stored):
            had, has = ("adapters", "none") if stored else ("no adapters", "some")
            raise UserError(f"the checkpoint's `{role}` has {had}, this run's {has}; continue with the same `lora`")
        if key == "base":
            raise UserError(
                f"the checkpoint's adapters of `{role}` were trained on other weights than this run's `model` has, or"
                " in another precision; continue with the same `model` and `strategy.precision`"
            )
        raise UserError(
            f"`lora.{key}` of `{role}` is {found[key]}, but the checkpoint has {stored[key]}; continue with the same"
        )


class Stored:
    """One role's state in a checkpoint, see `rlflow.strategies.strategy.StoredState`."""

    def __init__(self, folder: Path, role: str, index: RoleIndex) -> None:
        self._folder, self._role, self._index = folder, role, index
        self._files: dict[str, Any] = {}  # open ones

    @property
    def kinds(self) -> tuple[str, ...]:
        """What there is of each parameter."""
        return tuple(self._index.kinds)

    def require(self, shapes: dict[str, torch.Size], kinds: Iterable[str]) -> None:
        """Refuse a state of another model or optimizer."""
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
        if {*self._index.kinds} != {*kinds}:
            raise UserError(
                f"role `{self._role}`: {where} has {', '.join(self._index.kinds)} of each weight, and this run's"
                f" optimizer keeps {', '.join(kinds)}; continue with the same `optimizer`"
            )

    def read(self, parameter: str, kind: str, start: int, length: int) -> Tensor:
        """`[length]`: a range of the flattened tensor, put together from the files where it lies.

        Raises:
            OSError: One of them is not there or damaged; the error has its name.
        """
        ranges, end = self._index.ranges[parameter], start + length
        found: list[Tensor] = []
        place = max(0, bisect_right(ranges, start, key=lambda part: part[0]) - 1)
        for first, count, file in ranges[place:]:
            if first >= end:
                break
            low, high = max(start, first), min(end, first + count)
            if low < high:
                name = self._index.files[file]
                found.append(self._part(name, f"{parameter}/{kind}", low - first, high - first))
        whole = found[0] if len(found) == 1 else torch.cat([*found, torch.empty(0)])
        assert len(whole) == length, (parameter, kind, start, length)
        return whole

    def _part(self, name: str, key: str, start: int, end: int) -> Tensor:
        try:
            values: Tensor = self._open(name).get_slice(key)[start:end]
        except SafetensorError as error:
            raise OSError(f"{self._folder / name} is damaged ({one_line(error)})") from error
        return values

    def _open(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = safe_open(self._folder / name, "pt", backend="pread")
        return self._files[name]
