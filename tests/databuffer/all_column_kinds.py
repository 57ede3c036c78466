"""A value with a column of every cut and many dtypes, to test exchanges; each row is made from its id alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from rlflow.values.column_kinds import ColumnKind, OnDemand, PerSample, PerToken, Rows, Scalar
from rlflow.values.columns import Parts
from rlflow.values.not_sent import NotSent
from rlflow.values.ragged import Ragged


@dataclass(frozen=True)
class Everything:
    """Columns of every kind."""

    ids: PerSample  # int64
    finished: PerSample  # bool
    matrix: PerSample  # [B, 2, 3] float32
    parts: dict[str, PerSample]  # float32
    response: PerToken  # int64
    mask: PerToken  # bool
    logprobs: PerToken  # bfloat16
    hidden: PerToken  # [B, T, 3, 1] float64
    prompt: Ragged  # int64
    images: Ragged  # [sum, 2] float16
    number: Scalar
    rows: Rows
    texts: Annotated[list[str], ColumnKind.JSON, OnDemand]


def everything(ids: list[int], length_of: dict[int, int]) -> Everything:
    """The rows of these ids, in this order; `length_of` their response lengths."""
    lengths = [length_of[i] for i in ids]
    return Everything(
        ids=torch.tensor(ids, dtype=torch.int64),
        finished=torch.tensor([i % 3 == 0 for i in ids], dtype=torch.bool),
        matrix=torch.stack([_noise(i, 2, 3) for i in ids]) if ids else torch.zeros(0, 2, 3),
        parts=Parts(right=torch.tensor([i / 7 for i in ids]), length=torch.tensor([float(i) for i in ids])),
        response=_padded([torch.arange(n) + 100 * i for i, n in zip(ids, lengths, strict=True)], torch.int64),
        mask=_padded([torch.arange(n) % 2 == i % 2 for i, n in zip(ids, lengths, strict=True)], torch.bool),
        logprobs=_padded([_noise(i, n) for i, n in zip(ids, lengths, strict=True)], torch.bfloat16),
        hidden=_padded([_noise(i, n, 3, 1) for i, n in zip(ids, lengths, strict=True)], torch.float64, 3, 1),
        prompt=Ragged.from_lists([[i] * (i % 5) for i in ids]),
        images=Ragged(
            torch.cat([torch.zeros(0, 2), *(_noise(i, i % 4, 2) for i in ids)]).to(torch.float16),
            torch.tensor([i % 4 for i in ids], dtype=torch.int64),
        ),
        number=torch.tensor(0.1, dtype=torch.float64),
        rows=[{"id": i, "question": "wie viel? \U0001f642 \n" * (i % 3), "parts": [i, None, 0.1 * i]} for i in ids],
        texts=[f"text {i}" for i in ids],
    )


def differences(found: Everything, expected: Everything) -> list[str]:
    """The names of the columns that differ in dtype, shape or any bit; texts that were not asked for are let pass."""
    names = [field.name for field in dataclasses.fields(Everything)]
    there = [name for name in names if name != "texts" or not isinstance(found.texts, NotSent)]
    return [name for name in there if not _equal(getattr(found, name), getattr(expected, name))]


def _equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, Parts):
        return found.keys() == expected.keys() and all(_equal(found[name], expected[name]) for name in expected)
    if isinstance(expected, Ragged):
        return _equal(found.values, expected.values) and _equal(found.lengths, expected.lengths)
    if isinstance(expected, Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    return bool(found == expected)


def _noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _padded(rows: list[Tensor], dtype: torch.dtype, *entry: int) -> Tensor:
    padded = torch.zeros(len(rows), max((len(row) for row in rows), default=0), *entry, dtype=dtype)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row.to(dtype)
    return padded
