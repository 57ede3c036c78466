"""Ends a run when its time is over."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

from rlflow.callbacks.callback import Callback, RunningTrainer
from rlflow.errors import UserError
from rlflow.module import RLModule

Duration = dict[str, float] | str | timedelta  # in this order: jsonargparse reads 12 minutes in "00:12:00:00"


class Timer(Callback):
    """Ends the run after the step in which training has lasted for a duration. The runs that it resumes count too.

    `trainer.max_seconds` counts only the time of this run.

    Args:
        duration: `DD:HH:MM:SS`, a `timedelta`, or its arguments, such as `{"hours": 3}`. None to only measure the time.
        interval: Only `step`: the time is compared after each step.
        verbose: Whether a line is printed when the run ends.

    Raises:
        UserError: The duration has none of these forms, or `interval` is not `step`.
    """

    def __init__(
        self,
        duration: Duration | None = None,
        interval: Literal["step"] = "step",
        verbose: bool = True,
    ) -> None:
        if interval != "step":
            raise UserError(f"`interval` of Timer is {interval!r}; the time is compared after each step: leave it out")
        self._duration = None if duration is None else seconds_of(duration, "`duration` of Timer")
        self._verbose = verbose
        self._before = 0.0  # seconds of the runs that this one resumes
        self._elapsed = 0.0

    def time_elapsed(self, stage: Literal["train"] = "train") -> float:
        """Seconds of training, the only stage, up to the last step, as the slowest rank measured them."""
        if stage != "train":
            raise UserError(f"Timer was asked for the stage {stage!r}, and it measures training alone; ask for 'train'")
        return self._before + self._elapsed

    def time_remaining(self, stage: Literal["train"] = "train") -> float | None:
        """Seconds that are left; None without a duration."""
        return None if self._duration is None else self._duration - self.time_elapsed(stage)

    def on_fit_start(self, trainer: RunningTrainer, module: RLModule) -> None:
        self._elapsed = 0.0
        if not trainer.global_step:  # another run of this trainer, which resumes none
            self._before = 0.0
        self._check(trainer)

    def on_step_end(self, trainer: RunningTrainer, module: RLModule, step: int, metrics: dict[str, float]) -> None:
        self._elapsed = metrics["time/elapsed"]
        self._check(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": self.time_elapsed()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._before = state["time_elapsed"]

    def _check(self, trainer: RunningTrainer) -> None:
        remaining = self.time_remaining()
        if remaining is None or remaining > 0:
            return
        trainer.should_stop = True
        if self._verbose:
            lasted = f"Timer: training has lasted {self.time_elapsed():.0f} s of {self._duration:.0f} s"
            trainer.print(f"{lasted}, so it ends here")


def seconds_of(duration: Duration, what: str) -> float:
    """The seconds of `DD:HH:MM:SS`, a `timedelta`, or the arguments of one; `what` is named in the error."""
    if isinstance(duration, timedelta):
        return duration.total_seconds()
    if isinstance(duration, dict):
        try:
            return timedelta(**duration).total_seconds()
        except TypeError as error:
            raise UserError(f"{what} is {duration!r}; give arguments of a timedelta, such as hours: 3") from error
    parts = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", str(duration).strip())
    if parts is None:
        raise UserError(f"{what} is {duration!r}; give DD:HH:MM:SS, such as 00:12:00:00")
    days, hours, minutes, seconds = map(int, parts.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
