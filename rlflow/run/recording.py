"""What loggers and the terminal are given of a run."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rlflow.loggers.console import Console
from rlflow.loggers.csv import CSVLogger
from rlflow.loggers.jsonl import JSONLLogger
from rlflow.loggers.lightning import LightningLogger
from rlflow.loggers.logger import Logger
from rlflow.process import startup
from rlflow.run.folder import RunFolder
from rlflow.run.resume import Resume
from rlflow.run.setup import Joined
from rlflow.run.summary import by_summary_name, on_terminal

if TYPE_CHECKING:
    from lightning.fabric.loggers.logger import Logger as FabricLogger
else:

    class FabricLogger(ABC):  # noqa: B024 (it only knows them)
        """The base of Lightning's loggers, which are imported when one is named."""

        @classmethod
        def __subclasshook__(cls, other: type) -> bool:
            names = (f"{each.__module__}.{each.__qualname__}" for each in other.__mro__)
            return "lightning.fabric.loggers.logger.Logger" in names


LoggerLike = Logger | FabricLogger


class Recording:
    """Starts the loggers, gives them metrics and samples, and finishes them when it is left, by an error too.

    Args:
        joined: This rank; rank 0's loggers are called.
        folder: Of the run.
        console: Shows the steps.
        loggers: Beside the run's own files.
        resume: From where the run goes on.
    """

    def __init__(
        self,
        joined: Joined,
        folder: RunFolder,
        console: Console,
        loggers: Sequence[LoggerLike],
        resume: Resume,
    ) -> None:
        records = joined.is_first and not joined.prepared.settings.fast_dev_run
        self._own: list[JSONLLogger | CSVLogger] = [JSONLLogger(), CSVLogger()] if records else []
        others = [each if isinstance(each, Logger) else LightningLogger(each) for each in loggers]
        for place, each in enumerate(others):
            if isinstance(each, LightningLogger):
                each.place = place
        self._loggers: list[Logger] = [*self._own, *others] if records else []
        self._joined = joined
        self._folder = folder
        self._console = console
        self._done_before = resume.done
        self._first_step = 0 if resume.checkpoint is None else resume.done + 1
        self._started: list[Logger] = []

    def __enter__(self) -> Self:
        try:
            for logger in self._loggers:
                logger.start(self._folder.path, first_step=self._first_step)
                self._started.append(logger)
                if self._joined.config is not None:
                    logger.log_config(self._joined.config)
        except BaseException:
            self._finalize("failed")
            raise
        self._warn()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finalize("success" if error is None else "failed")

    def begin(self, validation: dict[str, float]) -> None:
        """Record the validation before the first step, if there was one; called by all ranks."""
        self._write(validation, self._done_before)
        if validation:
            shown = on_terminal(by_summary_name(validation)).items()
            values = (f"{'greedy' if name == 'greedy_accuracy' else name} {value:.3f}" for name, value in shown)
            self._console.say(f"before training: {', '.join(values)}")
        self._console.say(startup.end().line())
        self._console.begin()

    def step(self, done: int, metrics: dict[str, float], records: bool) -> None:
        """Show a step, and record it if so; called by all ranks."""
        self._write(metrics, done, records)
        self._console.step(done, metrics)

    def _finalize(self, status: str) -> None:
        with ExitStack() as stack:
            for logger in self._started:
                stack.callback(logger.finalize, status)

    def _write(self, metrics: dict[str, float], done: int, records: bool = True) -> None:
        samples = self._joined.samples.take(done - 1)
        for logger in self._loggers if records else ():
            if metrics:
                logger.log_metrics(metrics, done)
            if samples:
                logger.log_samples(samples, done)
        self._warn()

    def _warn(self) -> None:
        """Show what is damaged of the run's own files."""
        for logger in self._own:
            while logger.warnings:
                self._console.say(logger.warnings.pop(0))
