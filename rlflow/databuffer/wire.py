"""A column as rows of bytes, and rows of bytes as a column again: no padding, no pickle, every dtype preserved.

Rows that lie one after another are moved as one piece, and a column whose bytes lie in order already is a view of them.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlflow.values.column_kinds import ColumnKind
from rlflow.values.columns import Parts
from rlflow.values.host_copy import on_device, on_host
from rlflow.values.ragged import Ragged

Data = Any  # data of one column: a Tensor, a Ragged, a list of JSON-able objects, or Parts
Piece = tuple[Tensor, int, int]  # bytes of a buffer: from the first offset up to the second

_NARROW = 64  # bytes: rows up to here are gathered by index, where pieces would cost more than a copy


@dataclass(frozen=True)
class Form:
    """The form of a column: all that is needed to read its bytes.

    Attributes:
        dtype: Dtype of its tensor.
        entry: The shape of one entry: what follows `[B]`, `[B, T]`, or the one dimension of ragged values.
        device: The kind of device that holds it.
        names: Names of the parts of a `PARTS` column, in the order in which they lie in an entry.
    """

    dtype: torch.dtype
    entry: tuple[int, ...]
    device: str
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, kind: ColumnKind, data: Data) -> Form:
        """The form of a column."""
        if kind is ColumnKind.JSON:
            return cls(torch.uint8, (), "cpu")
        if kind is ColumnKind.PARTS:
            names = tuple(sorted(data))
            first = data[names[0]]
            return cls(first.dtype, (len(names),), first.device.type, names)
        tensor: Tensor = data.values if kind is ColumnKind.RAGGED else data
        entry_starts = {ColumnKind.SAMPLE: 1, ColumnKind.RAGGED: 1, ColumnKind.TOKEN: 2, ColumnKind.SCALAR: 0}[kind]
        return cls(tensor.dtype, tuple(tensor.shape[entry_starts:]), tensor.device.type)

    @property
    def width(self) -> int:
        """Bytes of one entry."""
        return self.dtype.itemsize * math.prod(self.entry)

    def to_json(self) -> dict[str, Any]:
        """The form as JSON, for ranks that hold no rows of the column."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {"dtype": dtype, "entry": self.entry, "device": self.device, "names": self.names}

    @classmethod
    def from_json(cls, form: dict[str, Any]) -> Form:
        """The form that `to_json` wrote."""
        return cls(getattr(torch, form["dtype"]), tuple(form["entry"]), form["device"], tuple(form["names"]))


@dataclass(frozen=True)
class RowBytes:
    """Rows as bytes somewhere in one buffer.

    Attributes:
        buffer: `[bytes]` uint8.
        starts: `[n]` int64, on the CPU: the offset of each row.
        sizes: `[n]` int64, on the CPU: the number of bytes of each row.
    """

    buffer: Tensor
    starts: Tensor
    sizes: Tensor

    def take(self, index: Tensor) -> RowBytes:
        """The rows at `index` `[k]` int64, in that order; they may repeat."""
        return RowBytes(self.buffer, self.starts[index], self.sizes[index])

    def pieces(self, counts: Sequence[int]) -> list[list[Piece]]:
        """The bytes of the first `counts[0]` rows, of the next `counts[1]`, ..., each as few pieces as possible."""
        ends = self.starts + self.sizes
        begins = torch.ones(len(ends), dtype=torch.bool)
        begins[1:] = self.starts[1:] != ends[:-1]
        bounds = torch.tensor([0, *counts]).cumsum(0)
        begins[bounds[bounds < len(ends)]] = True
        first = begins.nonzero()[:, 0]
        last = torch.cat([first[1:], torch.tensor([len(ends)])]) - 1 if len(first) else first
        runs = [(self.buffer, a, b) for a, b in zip(self.starts[first].tolist(), ends[last].tolist(), strict=True)]
        cuts = torch.searchsorted(first, bounds).tolist()
        return [runs[a:b] for a, b in itertools.pairwise(cuts)]


def to_bytes(kind: ColumnKind, data: Data, lengths: Tensor, rows: Tensor, device: torch.device) -> RowBytes:
    """The bytes of some rows. The bytes of a tensor that is on `device` already are a view of it where possible.

    Args:
        kind: Kind of the column, which says how it is cut by rows.
        data: Data of the column, `B` rows.
        lengths: `[B]` int64, entries of each row of a `TOKEN` column.
        rows: `[n]` int64, indices of the rows, in the order asked for; they may repeat.
        device: Device on which the bytes are wanted.
    """
    if kind is ColumnKind.JSON:
        texts = [json.dumps(data[row]).encode() for row in rows.tolist()]
        joined = bytearray(b"".join(texts))
        buffer = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
        return _in_a_row(on_device(buffer, device), torch.tensor([len(text) for text in texts], dtype=torch.int64))
    if kind is ColumnKind.PARTS:
        return to_bytes(ColumnKind.SAMPLE, stacked(data), lengths, rows, device)
    width = Form.of(kind, data).width
    if kind is ColumnKind.SAMPLE:
        if width <= _NARROW:
            return _in_a_row(_flat(data[on_device(rows, data.device)]).to(device), torch.full_like(rows, width))
        return RowBytes(_flat(data).to(device), rows * width, torch.full_like(rows, width))
    if kind is ColumnKind.RAGGED:
        return _in_a_row(_flat(data.values).to(device), on_host(data.lengths) * width).take(rows)
    return RowBytes(_flat(data).to(device), rows * (data.shape[1] * width), lengths[rows] * width)


def from_bytes(kind: ColumnKind, form: Form, rows: RowBytes, order: Tensor) -> Data:
    """A column of some rows; `TOKEN` columns are padded with zeros to their longest row.

    Args:
        kind: Kind of the column, which says how it is cut by rows.
        form: Form of the column, which says what its bytes mean.
        rows: The bytes; the column may be a view of their buffer.
        order: `[n]` int64, for each row of the column its index in `rows`; indices may repeat.
    """
    if kind is ColumnKind.PARTS:
        return unstacked(from_bytes(ColumnKind.SAMPLE, form, rows, order), form.names)
    if kind is ColumnKind.SAMPLE and form.width <= _NARROW:
        column = _joined(rows, (len(rows.sizes), *form.entry), form)
        in_order = len(order) == len(rows.sizes) and torch.equal(order, torch.arange(len(order)))
        return column if in_order else column[on_device(order, column.device)]
    rows = rows.take(order)
    if kind is ColumnKind.JSON:
        text = _joined(rows, (int(rows.sizes.sum()),), form).numpy().tobytes()
        ends = [0, *rows.sizes.cumsum(0).tolist()]
        return [json.loads(text[start:end]) for start, end in itertools.pairwise(ends)]
    if kind is ColumnKind.SAMPLE:
        return _joined(rows, (len(order), *form.entry), form)
    entries = rows.sizes // max(form.width, 1)
    if kind is ColumnKind.RAGGED:
        values = _joined(rows, (int(entries.sum()), *form.entry), form)
        return Ragged(values, on_device(entries, torch.device(form.device)))
    longest = int(entries.max()) if len(entries) else 0
    return _joined(rows, (len(order), longest, *form.entry), form, longest * form.width)


def stacked(parts: Mapping[str, Tensor]) -> Tensor:
    """`[B, P]`: the parts in the order of their names."""
    return torch.stack([parts[name] for name in sorted(parts)], dim=1)


def unstacked(columns: Tensor, names: Sequence[str]) -> Parts:
    """The parts that `stacked` was given; `names` are their names in order."""
    return Parts(zip(names, columns.unbind(dim=1), strict=True))


def copied(pieces: Sequence[Piece], out: Tensor) -> Tensor:
    """`out`, filled with pieces of buffers on its device, one after another.

    Args:
        pieces: Pieces that fill `out`; none where it is empty, as on a rank that only receives.
        out: `[bytes]` uint8.
    """
    if not pieces:
        return out
    if out.device.type != "cpu":
        return torch.cat([buffer[start:end] for buffer, start, end in pieces], out=out)
    into, at, last = out.numpy().data, 0, None
    for buffer, start, end in pieces:
        if buffer is not last:
            view, last = buffer.numpy().data, buffer
        stop = at + end - start
        into[at:stop] = view[start:end]
        at = stop
    return out


def _in_a_row(buffer: Tensor, sizes: Tensor) -> RowBytes:
    return RowBytes(buffer, sizes.cumsum(0) - sizes, sizes)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _joined(rows: RowBytes, shape: tuple[int, ...], form: Form, room: int | None = None) -> Tensor:
    """The rows as a tensor of this shape: a view of their buffer where they lie in it one after another.

    Args:
        rows: The rows in their order.
        shape: Shape of the tensor.
        form: Form of its column.
        room: Bytes of each row of the tensor; a shorter one is filled up with zeros. None where rows fill it.
    """
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=form.dtype, device=form.device)
    if room is None or bool((rows.sizes == room).all()):
        (pieces,) = rows.pieces([len(rows.sizes)])
        buffer, start, end = pieces[0]
        if len(pieces) == 1 and (buffer.storage_offset() + start) % form.dtype.itemsize == 0:
            return buffer[start:end].view(form.dtype).view(shape).to(form.device)
    else:
        zeros = rows.buffer.new_zeros(room)
        filled = zip(rows.starts.tolist(), (rows.starts + rows.sizes).tolist(), rows.sizes.tolist(), strict=True)
        pieces = [piece for a, b, size in filled for piece in ((rows.buffer, a, b), (zeros, 0, room - size))]
    joined = torch.empty(shape, dtype=form.dtype, device=rows.buffer.device)
    copied(pieces, _flat(joined))
    return joined.to(form.device)
