"""Kinds of columns, which say how values are cut by rows, and the types that nodes annotate them with.

`B` is the number of rows on this rank, `T` the longest response among them.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

from torch import Tensor


class ColumnKind(Enum):
    """Kind of a column: the way it is cut by rows, and so packed, padded and masked."""

    SAMPLE = "per sample"  # [B, ...]: one entry a row
    TOKEN = "per token"  # [B, T, ...]: right-padded; a row's entries are its response tokens
    RAGGED = "ragged"  # carries its own lengths
    JSON = "json"  # a list of B JSON-able objects
    SCALAR = "scalar"  # 0-dim: one number for the step, equal on all ranks
    PARTS = "per sample, by name"  # a dict of names to [B] numbers of one dtype
    PATH = "path"  # identity of each row: known wherever the row is, and never sent


class OnDemand:
    """Marks a large field that is seldom read: it is sent only to nodes whose parameter's type asks for it."""


PerSample = Annotated[Tensor, ColumnKind.SAMPLE]
PerToken = Annotated[Tensor, ColumnKind.TOKEN]
Scalar = Annotated[Tensor, ColumnKind.SCALAR]
Rows = Annotated[list[dict[str, Any]], ColumnKind.JSON]
Texts = Annotated[list[str], ColumnKind.JSON]
