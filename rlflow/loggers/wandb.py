"""Weights & Biases, through Lightning's logger. The only file that imports wandb."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from rlflow.errors import UserError, importable, require
from rlflow.loggers.logger import Logger
from rlflow.loggers.transcript import MESSAGES, transcript


class WandbLogger(Logger):
    """Metrics, the config and a table of samples, to Weights & Biases; steps are its `trainer/global_step`.

    Args:
        project: Name of the project.
        name: Name of the run; None for the name of the run's folder.
        entity: User or team; None for the login's default.
        mode: `offline` writes to the run's folder only, from where `wandb sync` sends it later.
        samples: Rows of the table of samples at each step.
    """

    def __init__(
        self,
        project: str = "rlflow",
        name: str | None = None,
        entity: str | None = None,
        mode: Literal["online", "offline"] = "online",
        samples: int = 20,
    ) -> None:
        require("wandb", "WandbLogger", "wandb")
        self.project = project
        self.name = name
        self.entity = entity
        self.mode = mode
        self.samples = samples

    def start(self, folder: Path, first_step: int = 0) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its own crash reports; read when it is imported
        with importable("wandb", "WandbLogger"):
            import wandb
            from lightning.pytorch.loggers import WandbLogger as LightningWandbLogger

        self._logger = LightningWandbLogger(
            name=self.name or folder.name,
            save_dir=folder,
            project=self.project,
            entity=self.entity,
            mode=self.mode,  # its own `offline` would set an environment variable
            # Output is in the run's log already, and the code is the user's: neither is sent.
            settings=wandb.Settings(console="off", disable_code=True, silent=True),
        )
        try:
            with _command_line_hidden():
                self._run = self._logger.experiment
        except wandb.errors.UsageError as error:
            cause = str(error).splitlines()[0].rstrip(".")
            raise UserError(
                f"Weights & Biases refused to start: {cause}. Run `wandb login`, or set the logger's `mode: offline`"
            ) from error

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._logger.log_metrics(metrics, step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        if not rows:
            return
        shown = [_cells(row) for row in rows[: self.samples]]
        columns = list(shown[0])
        self._logger.log_table("samples", columns, [[row[column] for column in columns] for row in shown], step=step)

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._logger.log_hyperparams(dict(config))

    def finish(self) -> None:
        self._run.finish()


def _cells(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A sample as a row of the table, in which a conversation is one text."""
    return {**row, MESSAGES: transcript(row[MESSAGES])} if MESSAGES in row else row


@contextmanager
def _command_line_hidden() -> Iterator[None]:
    """W&B records the command line, which may hold a secret; the config says all that it says."""
    given = sys.argv
    sys.argv = given[:1]
    try:
        yield
    finally:
        sys.argv = given
