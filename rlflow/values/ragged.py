"""Rows of different lengths without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlflow.values.host_copy import computed, joined, on_device, on_host, rows_at


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths without padding.

    Three prompts, `10 11`, an empty one, and `12 13 14`, are stored as

        values    10 11 12 13 14
        lengths   2 0 3

    Attributes:
        values: `[sum(lengths), ...]`, the entries of all rows, one row after the other.
        lengths: `[B]` int64, entries of each row.
    """

    values: Tensor
    lengths: Tensor

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[float]], dtype: torch.dtype = torch.int64) -> Ragged:
        """One row for each list."""
        flat = [entry for row in rows for entry in row]
        return cls(torch.tensor(flat, dtype=dtype), torch.tensor([len(row) for row in rows], dtype=torch.int64))

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor], none: Tensor) -> Ragged:
        """One row for each tensor, all on the CPU; `none` is an empty tensor with dtype and shape of the entries."""
        return cls(torch.cat([none, *rows]), torch.tensor([len(row) for row in rows], dtype=torch.int64))

    def __len__(self) -> int:
        return int(self.lengths.numel())

    def rows(self) -> tuple[Tensor, ...]:
        """Views of the rows, in order."""
        return torch.split(self.values, on_host(self.lengths).tolist())

    def padded(self) -> Tensor:
        """`[B, T, ...]`, right-padded with zeros."""
        lengths = on_host(self.lengths).tolist()
        if not lengths:
            return self.values.new_zeros(0, 0)
        return computed(lambda values: pad_sequence(list(torch.split(values, lengths)), batch_first=True), self.values)

    def on_host(self) -> Ragged:
        """The rows on the CPU, copied to the host at most once. Do not change them."""
        return Ragged(on_host(self.values), on_host(self.lengths))

    def take(self, index: Tensor) -> Ragged:
        """The rows at `index` `[K]` int64, in that order."""
        lengths, order = on_host(self.lengths).tolist(), on_host(index).tolist()
        values = computed(lambda values: _chosen(values, lengths, order), self.values)
        return Ragged(values, rows_at(self.lengths, index))

    def followed_by(self, other: Ragged) -> Ragged:
        """These rows, followed by the rows of `other`."""
        return Ragged(joined([self.values, other.values]), joined([self.lengths, other.lengths]))

    def shortened(self, by: Tensor) -> Ragged:
        """Each row without its last entries; `by` `[B]` int64 is the number of entries to drop, at most all of them."""
        lengths = (on_host(self.lengths) - on_host(by)).clamp(min=0)
        rows = [row[:length] for row, length in zip(self.rows(), lengths.tolist(), strict=True)]
        return Ragged(torch.cat([self.values[:0], *rows]), on_device(lengths, self.lengths.device))

    def each_followed_by(self, other: Ragged) -> Ragged:
        """Each row, followed by the row of `other` with the same index, such as tokens that are added to a prompt."""
        pairs = zip(self.rows(), other.rows(), strict=True)
        pieces = [piece for pair in pairs for piece in pair]
        return Ragged(torch.cat([self.values[:0], *pieces]), self.lengths + other.lengths)


def _chosen(values: Tensor, lengths: list[int], order: list[int]) -> Tensor:
    """The entries of the rows `order`, where `values` are rows of these lengths."""
    rows = torch.split(values, lengths)
    return torch.cat([rows[i] for i in order]) if order else values[:0]
