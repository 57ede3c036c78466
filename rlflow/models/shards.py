"""Each rank's part of a model's files in Hugging Face form: the tensors that it reads, and those that it writes."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlflow.models.lora import first_values
from rlflow.models.packed import PackedModel
from rlflow.models.weight_files import INDEX, WeightFiles, shard_name
from rlflow.models.weights import is_adapter, plain_name
from rlflow.storage.disk import Disk
from rlflow.storage.safetensors_files import StoredTensor, TensorRange, all_finite, write_tensors


@torch.no_grad()
def fill(
    model: PackedModel,
    part_of: Callable[[nn.Parameter], TensorRange],
    full_shape: Callable[[nn.Parameter], torch.Size],
    device: torch.device,
) -> None:
    """Read this rank's part of each parameter of a model that was built empty.

    Nothing is sent between ranks. Transformers converts some parameters, such as a layer's experts, which have a tensor
    each in the files. These are made on the CPU, one at a time: for experts, those that this rank has; for others, the
    whole parameter. A rank reads only its range of all other parameters.

    Args:
        model: Model that `ModelHandle.load` built as empty. Its parameters have been given memory since. Its `files`
            are None afterwards.
        part_of: Returns this rank's part of a parameter.
        full_shape: Returns the shape of a whole parameter.
        device: Device of buffers.

    Raises:
        UserError: A file is broken.
    """
    files, model.files = model.files, None
    assert files is not None, "not built empty"
    inner = model.model
    of_name = {plain_name(name): each for name, each in inner.named_parameters(remove_duplicate=False)}
    read, converted = _sources(inner, files, of_name)
    filled: set[nn.Parameter] = set()
    for first, conversion in converted.items():
        skipped = 0
        if _stacks(conversion):
            part, width = part_of(of_name[first]), full_shape(of_name[first])[1:].numel()
            if not part.values.numel():
                filled.add(of_name[first])
                continue
            rows = slice(part.start // width, -(-(part.start + part.values.numel()) // width))
            conversion.collected_tensors = {of: each[rows] for of, each in conversion.collected_tensors.items()}
            skipped = rows.start * width
        for name, made in conversion.convert(first, model=inner, config=inner.config).items():
            part = part_of(of_name[name])
            _cut(made[0] if isinstance(made, list) else made, replace(part, start=part.start - skipped))
            filled.add(of_name[name])
            del made
    for name, parameter in of_name.items():
        if name in read and parameter not in filled:
            files.read(read[name], part_of(parameter))
            filled.add(parameter)
    for name, parameter in inner.named_parameters():
        if is_adapter(name):
            _cut(first_values(name, full_shape(parameter)), part_of(parameter))
        elif parameter not in filled:
            assert model.new_head, name  # anything else that is missing was refused
            part_of(parameter).values.zero_()
    for name, buffer in list(model.named_buffers()):
        owner, _, key = name.rpartition(".")
        source = read.get(model.hf_name(name))
        value = buffer if source is None else files.whole(source, of_buffer=True).to(buffer.dtype)
        model.get_submodule(owner)._buffers[key] = value.to(device)
    files.close()


def _sources(
    model: Any, files: WeightFiles, parameters: Mapping[str, nn.Parameter]
) -> tuple[dict[str, str], dict[str, Any]]:
    """The source of each parameter or buffer: the name of a tensor in the files, or a conversion of several tensors.

    This follows `convert_and_load_state_dict_in_model` of transformers, which loads whole models.
    """
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    known = dict.fromkeys(map(plain_name, model.state_dict()), True)
    converters = [each for each in model._weight_conversions if isinstance(each, WeightConverter)]
    renamings = [each for each in model._weight_conversions if not isinstance(each, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    read: dict[str, str] = {}
    converted: dict[str, Any] = {}
    for key in sorted(files.names, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        if name not in known and key in known:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, known)
        if name not in known:
            continue
        if pattern is None:
            read[name] = key
        else:
            conversion = converted.setdefault(name, deepcopy(by_pattern[pattern]))
            conversion.add_tensor(name, key, pattern, partial(_whole, files, key, parameters[name].dtype))
    return read, converted


def _stacks(conversion: Any) -> bool:
    """Whether each tensor of a conversion becomes a row of the result, such as an expert, or some columns of a row."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    first, *others = conversion.operations
    return (
        isinstance(first, MergeModulelist)
        and first.dim == 0
        and all(isinstance(each, Concatenate) and each.dim for each in others)
    )


def _whole(files: WeightFiles, name: str, dtype: torch.dtype) -> Tensor:
    return files.whole(name).to(dtype)


def _cut(whole: Tensor, part: TensorRange) -> None:
    """Write a part of a whole tensor into it."""
    flat = whole.reshape(-1)
    part.values.copy_(part.cut(lambda start, length: flat[start : start + length]))


@dataclass(frozen=True)
class Unit:
    """Weights that are written together.

    Attributes:
        names: Names of the weights.
        entries: Tensors that transformers' files have for these weights, such as one for each of a layer's experts.
        shard: Number of the file, from 0.
    """

    names: tuple[str, ...]
    entries: tuple[StoredTensor, ...]
    shard: int

    @property
    def nbytes(self) -> int:
        """Bytes of the unit's tensors."""
        return sum(entry.nbytes for entry in self.entries)


def divided(model: PackedModel, empty: dict[str, Tensor], shards: int) -> list[Unit]:
    """Divide all weights among files, with sizes as even as whole weights allow; the same on every rank.

    Where a tensor of the files is made from several weights, these go to one file.

    Args:
        model: Model that has the weights.
        empty: Each weight in full, on the device `meta`, in the order in which they are gathered.
        shards: Largest number of files.
    """
    whole = _entries(model, empty)
    units: list[tuple[tuple[str, ...], tuple[StoredTensor, ...]]]
    try:
        units = [((name,), _entries(model, {name: tensor})) for name, tensor in empty.items()]
    except (KeyError, RuntimeError, ValueError):  # transformers needs several weights together
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
    what: str,
) -> None:
    """Let a disk write one file while the weights of all files are gathered; no file if it would be empty.

    Args:
        path: The file.
        role: Role that has the weights.
        model: Model that has the weights.
        units: Units of this file.
        weights: Whole weights of all files by name, in the order of `divided`. The iterator is always read to its end,
            since gathering weights is a collective. A weight may be overwritten when the next one is taken.
        disk: Disk that writes the file.
        what: Name of the model in the error that a weight is infinite or NaN.
    """
    if not units:
        deque(weights, maxlen=0)
        return
    stream = disk.stream(partial(_write, path, what, role, units))
    try:
        for entry, tensor in _in_file(model, units, weights):
            stream.put(disk.copy(f"{path}/{entry.key}", tensor))
    finally:
        stream.put(None)


def write_shard_later(
    path: Path,
    role: str,
    model: PackedModel,
    units: Sequence[Unit],
    weights: Iterable[tuple[str, Tensor]],
    disk: Disk,
    what: str,
) -> None:
    """Like `write_shard`, but the disk's thread takes the weights when it writes them; they are not copied.

    Args:
        path: The file.
        role: Role that has the weights.
        model: Model that has the weights.
        units: Units of this file.
        weights: Whole weights of these units by name, in the order of `divided`.
        disk: Disk that writes the file.
        what: See `write_shard`.
    """
    if units:
        disk.do(lambda: _write(path, what, role, units, (tensor for _, tensor in _in_file(model, units, weights))))


def _write(path: Path, what: str, role: str, units: Sequence[Unit], tensors: Iterable[Tensor]) -> None:
    entries = [entry for unit in units for entry in unit.entries]
    write_tensors(path, entries, all_finite(what, role, entries, tensors), {"format": "pt"})


def _in_file(
    model: PackedModel, units: Sequence[Unit], weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[StoredTensor, Tensor]]:
    """The tensors of a file with these units, in the order of the file."""
    own = {key: unit for unit in units for key in unit.names}
    waiting: dict[str, Tensor] = {}  # weights of a unit that waits for its other weights
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
    """Write the index of a model in several files, in transformers' form: which file has which tensor."""
    places = {entry.key: shard_name(unit.shard, count) for unit in units for entry in unit.entries}
    total = sum(unit.nbytes for unit in units)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n")


def _entries(model: PackedModel, state_dict: dict[str, Tensor]) -> tuple[StoredTensor, ...]:
    return tuple(StoredTensor.of(name, tensor) for name, tensor in model.in_files(state_dict).items())
