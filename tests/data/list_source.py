"""A dataset in memory that counts its reads."""

from __future__ import annotations

from typing import Any

from rlflow.data.sources import Source


class Listed(Source):
    """The given rows.

    Attributes:
        reads: Every row that was read, in order.
    """

    name = "listed"

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.reads: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        self.reads.append(row)
        return self.rows[row]
