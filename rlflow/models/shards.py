"""Which rank writes which tensors of a model's files in Hugging Face form."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from rlflow.models.packed import PackedModel
from rlflow.models.weight_files import INDEX, shard_name
from rlflow.storage.disk import Disk
from rlflow.storage.tensors import StoredTensor, all_finite, write_tensors


@dataclass(frozen=True)
class Unit:
    """Weights that are written together.

    Attributes:
        names: Of the weights.
        entries: What transformers' files have of them, such as each of a layer's experts.
        shard: The file, from 0.
    """

    names: tuple[str, ...]
    entries: tuple[StoredTensor, ...]
    shard: int

    @property
    def nbytes(self) -> int:
        """Of its tensors."""
        return sum(entry.nbytes for entry in self.entries)


def divided(model: PackedModel, empty: dict[str, Tensor], shards: int) -> list[Unit]:
    """Every weight with the file that it goes to, as even as whole weights allow; the same on every rank.

    Where a file's tensor is made of several weights, all go to one file.

    Args:
        model: Theirs.
        empty: Each weight in full, on the device `meta`, in the order in which they are gathered.
        shards: Files at most.
    """
    whole = _entries(model, empty)
    units: list[tuple[tuple[str, ...], tuple[StoredTensor, ...]]]
    try:
        units = [((name,), _entries(model, {name: tensor})) for name, tensor in empty.items()]
    except (KeyError, RuntimeError, ValueError):  # transformers lacks the other weights
        units = []
    if {entry for _, entries in units for entry in entries} != {*whole}:
        units = [(tuple(empty), whole)]
    filled = [0] * shards  # bytes
    found = []
    for names, entries in units:
        shard = filled.index(min(filled))
        found.append(Unit(names, entries, shard))
        filled[shard] += found[-1].nbytes
    return found


def write_shard(
    path: Path,
    role: str,
    model: PackedModel,
    units: Sequence[Unit],
    weights: Iterable[tuple[str, Tensor]],
    disk: Disk,
    what: str | None = None,
) -> tuple[Path, ...]:
    """Let a disk write one file, while all weights pass by.

    Args:
        path: The file.
        role: Whose weights they are.
        model: Theirs.
        units: Of this file.
        weights: Whole ones by name, of all files, in the order of `divided`; taken to the end, for gathering them is a
            collective. Each holds until the next.
        disk: Writes.
        what: The model is called where a weight is infinite or NaN; None for the folder's name.

    Returns:
        The file; nothing where it would be empty.
    """
    if not units:
        deque(weights, maxlen=0)
        return ()
    stream = disk.stream(partial(_write, path, what, role, units))
    try:
        for entry, tensor in _in_file(model, units, weights):
            stream.put(disk.copy(f"{path}/{entry.key}", tensor))
    finally:
        stream.close()
    return (path,)


def write_shard_later(
    path: Path,
    role: str,
    model: PackedModel,
    units: Sequence[Unit],
    weights: Iterable[tuple[str, Tensor]],
    disk: Disk,
    what: str | None = None,
) -> tuple[Path, ...]:
    """As `write_shard`, of weights that can be had when the disk asks for them; they are not copied.

    Args:
        path: The file.
        role: Whose weights they are.
        model: Theirs.
        units: Of this file.
        weights: Whole ones by name, in the order of `divided`; asked for in the disk's thread.
        disk: Writes.
        what: As `write_shard`.
    """
    if not units:
        return ()
    disk.do(lambda: _write(path, what, role, units, (tensor for _, tensor in _in_file(model, units, weights))))
    return (path,)


def _write(path: Path, what: str | None, role: str, units: Sequence[Unit], tensors: Iterable[Tensor]) -> None:
    entries = [entry for unit in units for entry in unit.entries]
    finite = all_finite(what or path.parent.stem, role, entries, tensors)
    write_tensors(path, entries, finite, {"format": "pt"})


def _in_file(
    model: PackedModel, units: Sequence[Unit], weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[StoredTensor, Tensor]]:
    """What a file of these units has, in its order."""
    own = {key: unit for unit in units for key in unit.names}
    waiting: dict[str, Tensor] = {}  # of a unit whose other weights are still to come
    for key, weight in weights:
        unit = own.get(key)
        if unit is None:
            continue
        waiting[key] = weight if len(unit.names) == 1 else weight.clone()
        if key == unit.names[-1]:
            files = model.in_files(waiting)
            yield from ((entry, files[entry.key]) for entry in unit.entries)
            waiting = {}


def write_index(folder: Path, units: Iterable[Unit], count: int) -> None:
    """Say which file has which tensor, as transformers does where there are several."""
    places = {entry.key: shard_name(unit.shard, count) for unit in units for entry in unit.entries}
    total = sum(unit.nbytes for unit in units)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n")


def _entries(model: PackedModel, state_dict: dict[str, Tensor]) -> tuple[StoredTensor, ...]:
    return tuple(StoredTensor.of(name, tensor) for name, tensor in model.in_files(state_dict).items())
