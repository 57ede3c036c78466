"""Metrics and samples as JSON lines: `metrics.jsonl` and `samples.jsonl` in the run's folder."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rlflow.loggers.lines import whole_lines
from rlflow.loggers.logger import Logger

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"


class JSONLLogger(Logger):
    """One line for each call of `log_metrics` and for each sample, written out at once.

    JSON has no NaN and no infinity: they are recorded as null.
    """

    def start(self, folder: Path, first_step: int = 0) -> None:
        self._metrics = _continued(folder / METRICS_FILE, first_step)
        self._samples = _continued(folder / SAMPLES_FILE, first_step)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        _write(self._metrics, [{"step": step, **finite}])

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        _write(self._samples, [{"step": step, **row} for row in rows])

    def finish(self) -> None:
        self._metrics.close()
        self._samples.close()


def read_metrics(folder: Path) -> list[dict[str, float | None]]:
    """The lines of a run folder's `metrics.jsonl`, in order."""
    return _lines(folder / METRICS_FILE)


def read_samples(folder: Path) -> Iterator[dict[str, Any]]:
    """The samples of a run folder's `samples.jsonl`, in order."""
    return map(json.loads, whole_lines(folder / SAMPLES_FILE))


def _continued(path: Path, first_step: int) -> TextIO:
    """`path`, open for writing after its lines of steps before `first_step`; the others are dropped.

    The file is replaced in one move, so that a run killed meanwhile leaves the old one or the new one.
    """
    kept = [line for line in _lines(path) if line["step"] < first_step] if path.exists() else []
    draft = path.with_suffix(".jsonl.draft")
    with draft.open("w", encoding="utf-8") as file:
        _write(file, kept)
    os.replace(draft, path)
    return path.open("a", encoding="utf-8")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in whole_lines(path)]


def _write(file: TextIO, lines: Sequence[Mapping[str, Any]]) -> None:
    file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    file.flush()
