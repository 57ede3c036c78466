"""TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlflow.errors import require
from rlflow.loggers.logger import Logger
from rlflow.loggers.transcript import MESSAGES, transcript


class TensorBoardLogger(Logger):
    """Metrics as scalars, samples and config as text, under `tensorboard/` in the run's folder.

    Args:
        samples: Samples shown at each step.
    """

    def __init__(self, samples: int = 20) -> None:
        require("tensorboard", "TensorBoardLogger", "tensorboard")
        self.samples = samples

    def start(self, folder: Path, first_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard hides what an earlier run wrote of this and later steps.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        self._writer.add_text("samples", "\n\n".join(map(_sample, rows[: self.samples])), step)

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._writer.add_text("config", _as_text(config))

    def finish(self) -> None:
        self._writer.close()


def _sample(row: Mapping[str, Any]) -> str:
    """A sample, its conversation below it."""
    shown = _as_text({name: value for name, value in row.items() if name != MESSAGES})
    said = transcript(row.get(MESSAGES, []))
    return f"{shown}\n{_code(said)}" if said else shown


def _as_text(value: Mapping[str, Any]) -> str:
    return _code(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def _code(text: str) -> str:
    """A code block of Markdown, in which no character of a response is markup."""
    return "".join(f"    {line}\n" for line in text.splitlines())
