"""Metrics as a table: `metrics.csv` in the run's folder."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlflow.loggers.lines import whole_lines
from rlflow.loggers.logger import Logger

METRICS_FILE = "metrics.csv"


class CSVLogger(Logger):
    """One row for each call of `log_metrics`, one column for each metric.

    A metric that first appears at a later step gets its column then: the file is written anew with the wider header,
    and the rows before it are empty there.
    """

    def start(self, folder: Path, first_step: int = 0) -> None:
        self._path = folder / METRICS_FILE
        self._columns = ["step"]
        kept: list[dict[str, str]] = []
        if self._path.exists():
            self._columns, rows = self._read()
            kept = [row for row in rows if int(row["step"]) < first_step]
        self._rewrite(kept)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        new = [name for name in metrics if name not in self._columns]
        if new:
            self._columns += new
            self._rewrite(self._read()[1])
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self._columns, restval="").writerow({"step": step, **metrics})

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        reader = csv.DictReader(whole_lines(self._path))
        return list(reader.fieldnames or ["step"]), list(reader)

    def _rewrite(self, rows: Sequence[Mapping[str, str]]) -> None:
        """Replace the file in one move, so that a run killed meanwhile leaves the old one or the new one."""
        draft = self._path.with_suffix(".csv.draft")
        with draft.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self._columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(draft, self._path)
