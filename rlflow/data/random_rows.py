"""`RandomRows`, a dataset whose rows a function draws."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cached_property
from typing import Any

from rlflow.data.sources import Source
from rlflow.dotted_path import object_at

DrawRow = Callable[[random.Random], dict[str, Any]]


class RandomRows(Source):
    """Rows that a function draws, each from the seed and its number alone.

    Args:
        draw: `draw(draws)` or its dotted path: a row, its columns by name, drawn from a `random.Random`.
        size: How many rows.
        seed: Of the draws.
    """

    def __init__(self, draw: str | DrawRow, size: int, seed: int = 0) -> None:
        self.draw = draw
        self.size = size
        self.seed = seed

    @property
    def name(self) -> str:
        return f"rows of {self.draw if isinstance(self.draw, str) else self.draw.__qualname__}"

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self._draw(random.Random(f"{self.seed}/{row}"))

    @cached_property
    def _draw(self) -> DrawRow:
        return self.draw if callable(self.draw) else object_at(self.draw, f"`draw` is {self.draw!r}")
