"""Which checkpoints of a run stay: the last ones, and those of the best values of a metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Mode = Literal["min", "max"]
ALL = -1  # `save_top_k` for all checkpoints


@dataclass(frozen=True)
class Retention:
    """What stays; the names and meanings are those of Lightning's `ModelCheckpoint`, but for `last`, which is a number.

    Args:
        last: So many of the last ones.
        top_k: And so many of the best by `monitor`, which may be among the last; -1 for all checkpoints.
        monitor: A metric.
        mode: Whether a smaller (`min`) or a larger (`max`) value is better.
    """

    last: int
    top_k: int = 0
    monitor: str | None = None
    mode: Mode = "min"

    def staying(self, values: Mapping[Path, float | None]) -> list[Path]:
        """Those that stay, in the order of their steps.

        Args:
            values: Of the metric by checkpoint, in the order of their steps; None where it was not measured. Of equal
                values the later is better.
        """
        folders = list(values)
        if self.top_k == ALL:
            return folders
        measured = [of for of, value in values.items() if value is not None and not math.isnan(value)]
        best = sorted(measured, key=lambda of: (self._badness(values[of]), -folders.index(of)))[: self.top_k]
        last = folders[-self.last :]
        return [folder for folder in folders if folder in last or folder in best]

    def most(self, saves: int) -> int:
        """Checkpoints that are on the disk at once in a run of so many saves, one that is being written among them."""
        return saves if self.top_k == ALL else min(self.last + self.top_k + 1, saves)

    def _badness(self, value: float | None) -> float:
        assert value is not None
        return value if self.mode == "min" else -value
