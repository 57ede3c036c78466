"""A column as rows of bytes, and rows of bytes as a column again: no padding, no pickle, every dtype kept."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlflow.data.batch import Cut, Ragged

Data = Any  # of one column: a Tensor, a Ragged, or a list of JSON-able objects


@dataclass(frozen=True)
class Form:
    """What one must know of a column to read its bytes.

    Attributes:
        dtype: Of its tensor.
        entry: The shape of one entry: what follows `[B]`, `[B, T]`, or the one dimension of ragged values.
        device: The kind of device that holds it.
    """

    dtype: torch.dtype
    entry: tuple[int, ...]
    device: str

    @classmethod
    def of(cls, cut: Cut, data: Data) -> Form:
        """The form of a column."""
        if cut is Cut.JSON:
            return cls(torch.uint8, (), "cpu")
        tensor: Tensor = data.values if cut is Cut.RAGGED else data
        entry_starts = {Cut.SAMPLE: 1, Cut.RAGGED: 1, Cut.TOKEN: 2, Cut.SCALAR: 0}[cut]
        return cls(tensor.dtype, tuple(tensor.shape[entry_starts:]), tensor.device.type)

    @property
    def width(self) -> int:
        """Bytes of one entry."""
        return self.dtype.itemsize * math.prod(self.entry)

    def to_json(self) -> dict[str, Any]:
        """For ranks that hold nothing of the column."""
        return {"dtype": str(self.dtype).removeprefix("torch."), "entry": self.entry, "device": self.device}

    @classmethod
    def from_json(cls, form: dict[str, Any]) -> Form:
        """What `to_json` wrote."""
        return cls(getattr(torch, form["dtype"]), tuple(form["entry"]), form["device"])


def to_bytes(cut: Cut, data: Data, lengths: Tensor, rows: Sequence[int], device: torch.device) -> list[Tensor]:
    """The bytes of some rows, uint8: views of tensors that are on `device` already.

    Args:
        cut: How the column is cut.
        data: Its `B` rows.
        lengths: `[B]`, entries of each row of a `TOKEN` column.
        rows: Indices of the rows, in the order asked for; they may repeat.
        device: Where the bytes are wanted.
    """
    if cut is Cut.JSON:
        texts = [bytearray(json.dumps(data[row]).encode()) for row in rows]
        return [torch.frombuffer(text, dtype=torch.uint8).to(device) for text in texts]
    width = Form.of(cut, data).width
    if cut is Cut.SAMPLE:
        every = _flat(data).to(device).split([width] * len(data))
    elif cut is Cut.RAGGED:
        every = _flat(data.values).to(device).split((data.lengths * width).tolist())
    else:
        filled = lengths * width
        padding = data.shape[1] * width - filled
        every = _flat(data).to(device).split(torch.stack([filled, padding], dim=1).flatten().tolist())[::2]
    return [every[row] for row in rows]


def from_bytes(cut: Cut, form: Form, rows: Sequence[Tensor], device: torch.device) -> Data:
    """The column of these rows; `TOKEN` columns are padded with zeros to their longest row.

    Args:
        cut: How the column is cut.
        form: What its bytes mean.
        rows: The bytes of each row, uint8, on `device`.
        device: Where they are; the column is made there and moved to the kind of device in its form.
    """
    if cut is Cut.JSON:
        return [json.loads(row.cpu().numpy().tobytes()) for row in rows]
    if cut is Cut.SAMPLE:
        return _joined(rows, (len(rows), *form.entry), form, device)
    sizes = [row.numel() for row in rows]
    entries = [size // form.width for size in sizes]
    if cut is Cut.RAGGED:
        values = _joined(rows, (sum(entries), *form.entry), form, device)
        return Ragged(values, torch.tensor(entries, dtype=torch.int64, device=form.device))
    zeros = torch.zeros(max(sizes, default=0), dtype=torch.uint8, device=device)
    padded = [piece for row in rows for piece in (row, zeros[row.numel() :])]
    return _joined(padded, (len(rows), max(entries, default=0), *form.entry), form, device)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _joined(pieces: Sequence[Tensor], shape: tuple[int, ...], form: Form, device: torch.device) -> Tensor:
    joined = torch.empty(shape, dtype=form.dtype, device=device)
    if pieces:
        torch.cat(list(pieces), out=_flat(joined))
    return joined.to(form.device)
