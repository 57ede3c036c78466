"""Metrics as a table: `metrics.csv` in the run's folder."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rlflow.errors import readable_line
from rlflow.loggers.lines import continued
from rlflow.loggers.logger import Logger

METRICS_FILE = "metrics.csv"


class CSVLogger(Logger):
    """One row for each call of `log_metrics`, one column for each metric.

    A metric that first appears at a later step gets its column then: the file is rewritten with the wider header,
    and the rows before it are empty there. Rows that are damaged are left out then, and when a run is resumed; a file
    that is gone is started again. Characters of a name that cannot be printed, such as a line end, are in the header as
    Python writes them.

    Attributes:
        warnings: Warnings about a file that is damaged or gone, one line each.
    """

    def start(self, folder: Path, first_step: int = 0) -> None:
        self._path = folder / METRICS_FILE
        self.warnings: list[str] = []
        self._continue(first_step)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        metrics = {readable_line(name): float(value) for name, value in metrics.items()}
        if gone := not self._path.exists():
            self.warnings.append(f"warning: {self._path} is gone; a new one starts with step {step}")
        if gone or not metrics.keys() <= {*self._columns}:
            self._continue(step + 1)
            self._columns += [name for name in metrics if name not in self._columns]
            with self._path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
            self._write(rows)
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self._columns, restval="").writerow(metrics | {"step": step})

    def _continue(self, first_step: int) -> None:
        """Take the columns of the file and leave in it the rows of steps before the first, without damaged ones."""
        self._columns: list[str] = []
        self.warnings += continued(self._path, first_step, self._step_of)
        if not self._columns:
            self._columns = ["step"]
            self._write([])

    def _step_of(self, line: bytes) -> int | None:
        """The step of a row; -1 for the header, from which it takes the columns; None for a damaged line."""
        cells = _cells(line)
        if not self._columns and _is_header(cells):
            self._columns = cells
            return -1
        return int(cells[0]) if self._columns and _is_row(cells, self._columns) else None

    def _write(self, rows: Iterable[Mapping[str, str]]) -> None:
        """Replace the file in one move, so that a run killed in it leaves the old one or the new one."""
        draft = self._path.with_suffix(".csv.draft")
        with draft.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self._columns, restval="", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        draft.replace(self._path)


def _cells(line: bytes) -> list[str]:
    """The cells of a line of the table; none if the line is damaged."""
    try:
        return next(csv.reader([line.decode()], strict=True))
    except (ValueError, csv.Error):
        return []


def _is_header(cells: Sequence[str]) -> bool:
    return cells[:1] == ["step"] and len({*cells}) == len(cells) and all(cell.isprintable() for cell in cells)


def _is_row(cells: Sequence[str], columns: Sequence[str]) -> bool:
    try:
        [float(cell or 0) for cell in cells]
    except ValueError:
        return False
    return len(cells) == len(columns) and cells[0].isdecimal()
