"""Metrics and samples as JSON lines: `metrics.jsonl` and `samples.jsonl` in the run's folder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rlflow.loggers.lines import continued, json_lines, parsed
from rlflow.loggers.logger import Logger

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"


class JSONLLogger(Logger):
    """One line for each call of `log_metrics` and for each sample, written to disk immediately.

    A line of `metrics.jsonl` is such as `{"step": 3, "reward/mean": 0.25, "actor/loss": null}`, one of `samples.jsonl`
    such as `{"step": 3, "row": 7, "sample": 0, "prompt": "1+1=", "response": "2", "reward": 1.0, ...}`.

    JSON has no NaN and no infinity: they are recorded as null. A run that is resumed leaves out lines that are damaged.

    Attributes:
        warnings: Warnings about damaged files in the folder of a run that is resumed, one line each.
    """

    def start(self, folder: Path, first_step: int = 0) -> None:
        self.warnings: list[str] = []
        self._metrics = self._continued(folder / METRICS_FILE, first_step, _is_metrics)
        self._samples = self._continued(folder / SAMPLES_FILE, first_step, _is_of_step)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        numbers = {name: value for name, value in metrics.items() if name != "step"}
        finite = {name: float(value) if math.isfinite(value) else None for name, value in numbers.items()}
        _write(self._metrics, [{"step": step, **finite}])

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        _write(self._samples, [{"step": step, **row} for row in rows])

    def finalize(self, status: str) -> None:
        self._metrics.close()
        self._samples.close()

    def _continued(self, path: Path, first_step: int, is_right: Callable[[Any], bool]) -> TextIO:
        """`path`, open for writing after its lines of steps before `first_step`; the others are dropped."""

        def step_of(line: bytes) -> int | None:
            found = parsed(line, is_right)
            return None if found is None else int(found["step"])

        self.warnings += continued(path, first_step, step_of)
        return path.open("a", encoding="utf-8", errors="replace")  # of half characters, which JSON may hold


def read_metrics(folder: Path) -> list[dict[str, float | None]]:
    """The lines of a run folder's `metrics.jsonl`, in order.

    Raises:
        UserError: The file is damaged or not there.
    """
    return list(json_lines(folder / METRICS_FILE, _is_metrics))


def read_samples(folder: Path) -> Iterator[dict[str, Any]]:
    """The samples of a run folder's `samples.jsonl`, in order.

    Raises:
        UserError: The file is damaged or not there.
    """
    return json_lines(folder / SAMPLES_FILE, _is_of_step)


def _is_of_step(found: Any) -> bool:
    return isinstance(found, dict) and type(found.get("step")) is int


def _is_metrics(found: Any) -> bool:
    return _is_of_step(found) and all(value is None or type(value) in (int, float) for value in found.values())


def _write(file: TextIO, lines: Sequence[Mapping[str, Any]]) -> None:
    file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    file.flush()
