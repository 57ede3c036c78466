"""The interface of loggers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Logger(ABC):
    """Records a run. Only rank 0's loggers are called, in this order: `start`, any number of `log_*`, `finalize`.

    Constructors only store their arguments, so a config can be read without opening a file or a connection.

    Example:
        ```python
        class Printed(Logger):
            def log_metrics(self, metrics, step):
                print(step, metrics.get("reward/mean"))
        ```
    """

    def start(self, folder: Path, first_step: int = 0) -> None:  # noqa: B027 (a logger may have nothing to open)
        """Open files or connections.

        Args:
            folder: Folder of the run, which exists.
            first_step: First step of this run. If the run resumes from a checkpoint, it replaces the records that the
                earlier run has for this step and later steps.
        """

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics by name. Names may differ from step to step; steps never decrease."""

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:  # noqa: B027 (nor samples to show)
        """Record samples, JSON-able, with the same keys in every row.

        Args:
            rows: For each sample: the place of its prompt in the dataset, from 0 (`row`), its number among that
                prompt's samples (`sample`), `prompt`, `response`, `reward` and its `parts`, `failed` (the value of
                `on_error` if the reward failed on it, or None), `turns`, `ended` (why it ended), and for a conversation
                `messages`, as in `Rollout`. A sample that continues another one has `continues`, see
                `rlflow.controller.logged_samples`.
            step: Step of the run, from 1.
        """

    def log_config(self, config: Mapping[str, Any]) -> None:  # noqa: B027 (nor a config)
        """Record the resolved config, and under `code` and `versions` the commit and versions of packages.

        The caller has removed the secrets (`without_secrets`).
        """

    def log_graph(self, text: str) -> None:  # noqa: B027 (nor a graph)
        """Record the algorithm's graph, as `rlflow graph` prints it."""

    def finalize(self, status: str) -> None:  # noqa: B027 (nor anything to close)
        """Write out what is pending and close.

        Args:
            status: Status of the run, `success` or `failed`.
        """
