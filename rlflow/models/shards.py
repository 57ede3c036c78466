"""Which rank writes which tensors of a model's files in Hugging Face form."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from torch import Tensor

from rlflow.models.packed import PackedModel
from rlflow.models.weight_files import INDEX, shard_name
from rlflow.storage.disk import Disk
from rlflow.storage.tensors import StoredTensor


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
    model: PackedModel,
    units: Iterable[Unit],
    number: int,
    buckets: Iterable[Iterable[tuple[str, Tensor]]],
    disk: Disk,
) -> tuple[Path, ...]:
    """Let a disk write one file, while all weights pass by.

    Args:
        path: The file.
        model: Whose weights they are.
        units: Of all files.
        number: Of the shard.
        buckets: Whole weights by name, in the order of `divided`; taken to the end, for gathering them is a collective.
        disk: Writes.

    Returns:
        The file; nothing where no unit is of this shard.
    """
    own = {key: unit for unit in units if unit.shard == number for key in unit.names}
    passing = chain.from_iterable(buckets)
    if not own:
        deque(passing, maxlen=0)
        return ()
    stream = disk.write(path, [entry for unit in dict.fromkeys(own.values()) for entry in unit.entries])
    waiting: dict[str, Tensor] = {}  # of a unit whose other weights are still to come
    try:
        for key, weight in passing:
            unit = own.get(key)
            if unit is None:
                continue
            waiting[key] = weight if len(unit.names) == 1 else weight.clone()
            if key == unit.names[-1]:
                files = model.in_files(waiting)
                for entry in unit.entries:
                    stream.put(disk.copy(f"{path}/{entry.key}", files[entry.key]))
                waiting = {}
    finally:
        stream.close()
    return (path,)


def write_index(folder: Path, units: Iterable[Unit], count: int) -> None:
    """Say which file has which tensor, as transformers does where there are several."""
    places = {entry.key: shard_name(unit.shard, count) for unit in units for entry in unit.entries}
    total = sum(unit.nbytes for unit in units)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n")


def _entries(model: PackedModel, state_dict: dict[str, Tensor]) -> tuple[StoredTensor, ...]:
    return tuple(StoredTensor.of(name, tensor) for name, tensor in model.in_files(state_dict).items())
