"""The safetensors files of a model, read by ranges, so that a rank reads only its own part."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.errors import UserError, one_line
from rlflow.storage.safetensors_files import TensorFile, TensorRange, is_finite

INDEX = "model.safetensors.index.json"
CHUNK_BYTES = 32 * 2**20  # most bytes read at one time


def shard_name(number: int, count: int) -> str:
    """The name of a model's file `number`, from 0, of `count` files in Hugging Face form."""
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_generation_config(generation: Any, folder: Path) -> None:
    """Write a model's settings of generating, also those that `save_pretrained` would refuse in a published model."""
    generation.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])


class WeightFiles:
    """The tensors in a model's files, by name.

    Args:
        path: A folder in Hugging Face form, or a Hugging Face name.

    Raises:
        UserError: The files are not safetensors, a file is missing or broken, or (when it is read) a parameter has NaN
            or infinite values.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._in: dict[str, TensorFile] = {}  # the file that has each tensor
        for file in self._files():
            with self._readable(file):
                opened = TensorFile(file)
                self._in |= dict.fromkeys(opened.shapes, opened)

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._in)

    def shape(self, name: str) -> torch.Size:
        """The shape of a tensor."""
        return self._in[name].shapes[name]

    def close(self) -> None:
        """Close the files; nothing can be read afterwards."""
        for file in set(self._in.values()):
            file.close()

    def whole(self, name: str, of_buffer: bool = False) -> Tensor:
        """A tensor in the dtype of the file, on the CPU; a buffer may have infinite values, such as those of a mask."""
        file, shape = self._in[name], self.shape(name)
        with self._readable(file.path):
            values = file.read(name, 0, shape.numel()).view(shape)
        if not of_buffer:
            self._require_finite(name, values)
        return values

    def read(self, name: str, part: TensorRange) -> None:
        """Read into `part` the elements of a tensor that it holds, in its dtype, at most a chunk at a time."""
        file = self._in[name]
        for start, values in _chunks(part):
            starts = range(start, start + len(values) * max(1, part.width), max(1, part.width))
            with self._readable(file.path):
                found = torch.stack([file.read(name, first, values.shape[1]) for first in starts])
            self._require_finite(name, found)
            values.copy_(found)

    def _require_finite(self, name: str, values: Tensor) -> None:
        if not is_finite(values):
            raise UserError(not_finite(self._path, name))

    def _files(self) -> Iterator[Path]:
        single = self._file(shard_name(0, 1))
        if single is not None:
            yield single
            return
        index = self._file(INDEX)
        if index is None:
            raise UserError(
                f"`model` {str(self._path)!r} has no weights in safetensors, and only from these are names read for"
                " `configure_optimizers`, and parts for each rank; load it with transformers and save it by"
                " `save_pretrained`"
            )
        with self._readable(index):
            named = json.loads(index.read_text())["weight_map"]
        for name in sorted(set(named.values())):
            file = self._file(name)
            if file is None:
                raise UserError(
                    f"`model` {str(self._path)!r} lacks {name!r}, which its {INDEX} names; copy the model once more"
                )
            yield file

    def _file(self, name: str) -> Path | None:
        """A file of the model, wherever transformers keeps it; None if there is none."""
        from transformers.utils.hub import cached_file

        try:
            found = cached_file(str(self._path), name, _raise_exceptions_for_missing_entries=False)
        except OSError as error:
            raise UserError(
                f"`model` {str(self._path)!r} cannot be loaded ({str(error).splitlines()[0]}); check its files, or copy"
                " the model once more"
            ) from error
        return None if found is None else Path(found)

    @contextmanager
    def _readable(self, file: Path) -> Iterator[None]:
        from safetensors import SafetensorError

        try:
            yield
        except (OSError, KeyError, SafetensorError, ValueError) as error:
            raise UserError(
                f"`model` {str(self._path)!r} cannot be loaded: {file.name} is missing, cut short or broken"
                f" ({one_line(error)}); copy the model once more"
            ) from error


def _chunks(part: TensorRange) -> Iterator[tuple[int, Tensor]]:
    """A part in pieces `[rows, columns]` of at most a chunk: their first elements, and views; a range is one row."""
    most, rows = CHUNK_BYTES // 8, part.values if part.width else part.values[None]
    together = max(1, most // max(1, rows.shape[1]))
    for top in range(0, len(rows), together):
        for left in range(0, rows.shape[1], most):
            yield part.start + top * part.width + left, rows[top : top + together, left : left + most]


def finish(model: Any, files: WeightFiles) -> None:
    """Tie tied weights, and compute the buffers that no file holds, such as a rotary embedding's frequencies.

    Args:
        model: A transformers model with its parameters on the device `meta`.
        files: Files with its weights.
    """
    _tie(model, files)
    owners = set()
    for name, buffer in model.named_non_persistent_buffers():
        path, _, key = name.rpartition(".")
        owner = model.get_submodule(path)
        owner._buffers[key] = torch.empty_like(buffer, device="cpu")
        # A model may compute the buffers of its layers, as Falcon-H1 does.
        owners |= {owner, *(model.get_submodule(path[:end]) for end in range(len(path)) if path[end] == ".")}
    for owner in owners:
        owner._is_hf_initialized = False  # so that `initialize_weights` initialises these modules again, and no others
    with torch.random.fork_rng(devices=[]):
        model.initialize_weights()


COMPARED = 1 << 20  # elements compared at a time


def _tie(model: Any, files: WeightFiles) -> None:
    """Tie weights that are equal in the files, as transformers does; it cannot compare them on the device `meta`."""
    for target, source in list(model.all_tied_weights_keys.items()):
        if model.get_parameter(target) is model.get_parameter(source):
            continue
        if _equal(files, target, source):
            path, _, key = target.rpartition(".")
            setattr(model.get_submodule(path), key, model.get_parameter(source))
        else:
            del model.all_tied_weights_keys[target]


def _equal(files: WeightFiles, first: str, second: str) -> bool:
    shape = files.shape(first)
    if shape != files.shape(second):
        return False
    for start in range(0, shape.numel(), COMPARED):
        length = min(COMPARED, shape.numel() - start)
        parts = [TensorRange(start, torch.empty(length, dtype=torch.float64)) for _ in range(2)]
        for name, part in zip((first, second), parts, strict=True):
            files.read(name, part)
        if not torch.equal(parts[0].values, parts[1].values):
            return False
    return True


def not_finite(path: Path, name: str) -> str:
    """The error that a tensor in a model's files has NaN or infinite values.

    Args:
        path: Folder or Hugging Face name of the model.
        name: Name of the tensor.
    """
    return (
        f"`model` {str(path)!r} cannot be loaded: {name!r} has NaN or infinite values, which all scores would become;"
        " copy the model once more, or take one that was saved before they arose"
    )
