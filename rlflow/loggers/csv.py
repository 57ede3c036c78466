"""Metrics as a table: `metrics.csv` in the run's folder."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlflow.errors import UserError, readable_line
from rlflow.loggers.lines import Damage, whole_lines
from rlflow.loggers.logger import Logger

METRICS_FILE = "metrics.csv"


class CSVLogger(Logger):
    """One row for each call of `log_metrics`, one column for each metric.

    A metric that first appears at a later step gets its column then: the file is written anew with the wider header,
    and the rows before it are empty there. Rows that are damaged are left out then, as where a run goes on. What of a
    name cannot be printed, such as a line end, stands in the header as Python writes it.

    Attributes:
        warnings: Of a damaged file, a line each.
    """

    def start(self, folder: Path, first_step: int = 0) -> None:
        self.warnings: list[str] = []
        self._path = folder / METRICS_FILE
        self._columns, rows, damage = self._read()
        self._rewrite([row for row in rows if int(row["step"]) < first_step], damage)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        metrics = {readable_line(name): value for name, value in metrics.items()}
        new = [name for name in metrics if name not in self._columns]
        if new:
            self._columns += new
            _, rows, damage = self._read()
            self._rewrite(rows, damage)
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self._columns, restval="").writerow({"step": step, **metrics})

    def _read(self) -> tuple[list[str], list[dict[str, str]], Damage]:
        """The columns, and the rows that can be read; none where the header is damaged."""
        columns, rows, damage = ["step"], [], Damage(self._path)
        try:
            for number, line in enumerate(whole_lines(self._path) if self._path.exists() else (), 1):
                cells = _cells(line)
                if number == 1 and _is_header(cells):
                    columns = cells
                elif number > 1 and damage.first != 1 and _is_row(cells, columns):
                    rows.append(dict(zip(columns, cells, strict=True)))
                else:
                    damage.add(number)
        except UserError as error:
            damage.unreadable = str(error)
        return columns, rows, damage

    def _rewrite(self, rows: Sequence[Mapping[str, str]], damage: Damage) -> None:
        """Replace the file in one move, so that a run killed meanwhile leaves the old one or the new one."""
        draft = self._path.with_suffix(".csv.draft")
        with draft.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self._columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
        self.warnings += damage.replace(draft)


def _cells(line: bytes) -> list[str]:
    """Of a line of the table; none where it is damaged."""
    try:
        return next(csv.reader([line.decode()], strict=True))
    except (ValueError, csv.Error):
        return []


def _is_header(cells: Sequence[str]) -> bool:
    return cells[:1] == ["step"] and len({*cells}) == len(cells) and all(cell.isprintable() for cell in cells)


def _is_row(cells: Sequence[str], columns: Sequence[str]) -> bool:
    return len(cells) == len(columns) and cells[0].isdecimal() and all(map(_is_number, cells))


def _is_number(cell: str) -> bool:
    try:
        float(cell or 0)
    except ValueError:
        return False
    return True
