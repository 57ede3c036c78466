"""The rule by which checkpoints stay: the last ones, and those with the best values of a metric."""

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
    """Decides which checkpoints stay; names and meanings are of Lightning's `ModelCheckpoint`, but `last` is a number.

        Retention(last=1, top_k=2, monitor="val/loss").staying({step_10: 0.5, step_20: 0.3, step_30: 0.4, step_40: 0.6})
        -> [step_20, step_30, step_40]

    Args:
        last: Number of the newest checkpoints that stay.
        top_k: Number of the best by `monitor` that stay in addition; they may be among the newest. -1 for all of them.
        monitor: The metric that says which are best.
        mode: Whether a smaller (`min`) or a larger (`max`) value is better.
    """

    last: int
    top_k: int = 0
    monitor: str | None = None
    mode: Mode = "min"

    def staying(self, values: Mapping[Path, float | None]) -> list[Path]:
        """The checkpoints that stay, in the order of their steps.

        Args:
            values: The metric's value by checkpoint, in the order of steps; None if it was not measured. If two values
                are equal, that of the later step is better.
        """
        folders = list(values)
        if self.top_k == ALL:
            return folders
        sign = 1 if self.mode == "min" else -1
        badness = {of: sign * value for of, value in values.items() if value is not None and not math.isnan(value)}
        best = sorted(badness, key=lambda of: (badness[of], -folders.index(of)))[: self.top_k]
        last = folders[-self.last :]
        return [folder for folder in folders if folder in last or folder in best]

    def most(self, saves: int) -> int:
        """The most checkpoints on the disk at the same time in a run of `saves` saves, with the one being written."""
        return saves if self.top_k == ALL else min(self.last + self.top_k + 1, saves)
