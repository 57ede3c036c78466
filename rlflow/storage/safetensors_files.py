"""Safetensors files written tensor by tensor: the header is known beforehand, so no file is held in memory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlflow.errors import UserError

BLOCK = 64 * 2**20  # bytes written at a time
# The names of the format: https://github.com/huggingface/safetensors#format
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file.

    Attributes:
        key: Name of the tensor.
        shape: Shape of the tensor.
        dtype: Dtype of its elements.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, key: str, tensor: Tensor) -> StoredTensor:
        """The entry for a tensor under this name."""
        return cls(key, tuple(tensor.shape), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class TensorRange:
    """A part of a tensor on the rank that holds it: a range of the flattened tensor, or a block of it.

    Attributes:
        start: Place of the first element in the flattened whole.
        values: `[n]`, a view of the elements in the tensor that holds them; may be empty. `[rows, columns]` of a block.
        width: Elements of a row of the whole, if it is a block: consecutive rows, and consecutive columns of each. 0 if
            it is a range.
    """

    start: int
    values: Tensor
    width: int = 0

    def cut(self, read: Callable[[int, int], Tensor]) -> Tensor:
        """The same part of another tensor, shaped as `values`.

        Args:
            read: Returns elements of that tensor flattened, by the first element and their number.
        """
        if not self.width:
            return read(self.start, self.values.numel())
        rows, columns = self.values.shape
        column = self.start % self.width
        return read(self.start - column, rows * self.width).view(rows, -1).narrow(1, column, columns)


class TensorFile:
    """A safetensors file from which ranges of tensors are read. Safetensors reads a whole tensor for each slice of it.

    Args:
        path: The file.

    Attributes:
        path: The file.
        shapes: The shape of each tensor, by name.

    Raises:
        SafetensorError: The file is broken or cut short.
        OSError: The file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        with safe_open(path, framework="pt", backend="pread"):
            pass  # it checks the header, and that the file is as long as that says
        self.path = path
        self._file = path.open("rb", buffering=0)
        length = int.from_bytes(self._file.read(8), "little")
        header = json.loads(os.pread(self._file.fileno(), length, 8))
        header.pop("__metadata__", None)
        self.shapes = {name: torch.Size(of["shape"]) for name, of in header.items()}
        self._places = {name: (of["dtype"], 8 + length + of["data_offsets"][0]) for name, of in header.items()}

    def close(self) -> None:
        """Close the file; nothing can be read afterwards."""
        self._file.close()

    def read(self, name: str, start: int, length: int) -> Tensor:
        """A range of a flattened tensor, `[length]` on the CPU; only these elements are read.

        Args:
            name: Name of the tensor.
            start: The first element.
            length: Number of elements.

        Raises:
            OSError: The file was cut short meanwhile.
        """
        written, offset = self._places[name]
        values = torch.empty(length, dtype=DTYPES[written])
        left: memoryview = values.view(torch.uint8).numpy().data
        offset += start * values.itemsize
        while left:
            if not (count := os.preadv(self._file.fileno(), [left], offset)):
                raise OSError(f"{self._file.name} was cut short")
            left, offset = left[count:], offset + count
        return values


def write_tensors(
    path: Path, entries: Sequence[StoredTensor], tensors: Iterable[Tensor], metadata: Mapping[str, str] | None = None
) -> str:
    """Write a safetensors file, and wait until it is on the disk.

    Args:
        path: The file.
        entries: Entries of all tensors of the file.
        tensors: Tensors, one for each entry, in their order, on any device; taken one by one.
        metadata: Metadata of the file.

    Returns:
        The file's SHA-256.

    Raises:
        OSError: The file cannot be written; the error has its name.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for entry in entries:
        header[entry.key] = {
            "dtype": NAMES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": [end, end + entry.nbytes],
        }
        end += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:

        def write(block: memoryview) -> None:
            digest.update(block)
            try:
                while block:
                    block = block[os.write(file.fileno(), block) :]
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path)) from error

        write(memoryview(len(text).to_bytes(8, "little") + text))
        for entry, tensor in zip(entries, tensors, strict=True):
            assert StoredTensor.of(entry.key, tensor) == entry, (entry, tensor.shape, tensor.dtype)
            values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            for start in range(0, values.numel(), BLOCK):
                write(values[start : start + BLOCK].numpy().data)
        os.fsync(file.fileno())
    return digest.hexdigest()


def all_finite(what: str, role: str, entries: Iterable[StoredTensor], tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors, each after a check that it is finite.

    Args:
        what: Name of the saved thing in the error, such as `step-00000020`.
        role: Role that has the weights.
        entries: Entries, one for each tensor; the key of an optimizer's state is `<weight>/<kind>`.
        tensors: Tensors in the same order, on any device.

    Raises:
        UserError: A tensor has an infinite or NaN element.
    """
    for entry, tensor in zip(entries, tensors, strict=True):
        if not is_finite(tensor.detach()):
            raise UserError(_not_finite(what, role, entry.key))
        yield tensor


def sha256(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_finite(tensor: Tensor) -> bool:
    """Whether the tensor has neither NaN nor infinite elements."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # torch has no `aminmax` for 8-bit floats
    # If there is a NaN, both extremes are NaN. One pass finds both: much faster than `isfinite` of every element.
    return bool(torch.stack(wide.aminmax()).isfinite().all())


def _not_finite(saved_as: str, role: str, key: str) -> str:
    """The error line for a tensor that is not saved."""
    name, _, kind = key.partition("/")
    weights = f"the weights of `{role}`"
    what = f"{weights} are" if kind in ("", "weight") else f"{kind!r}, which the optimizer keeps of {weights}, is"
    return (
        f"{what} infinite or NaN, of {name!r} first, so {saved_as} was not saved; what was saved before is"
        " still there. Lower the learning rate, or look for NaN in rewards and loss"
    )
