"""Stop a run by rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rlflow.callbacks.callback import Callback, RunningTrainer
from rlflow.errors import UserError, did_you_mean
from rlflow.module import RLModule


class EarlyStopping(Callback):
    """Ends the run once a metric is good enough, or no longer gets better.

    A metric of validation (`val...`) is looked at after each validation, any other after each step.

    Example:
        `EarlyStopping("val/accuracy", stopping_threshold=0.8)` ends the run after the first validation with an accuracy
        of 0.8 or more, `EarlyStopping("actor/kl", mode="min", patience=50)` after 50 steps in a row without a lower KL.

    Args:
        monitor: Name of the metric.
        mode: Whether larger (`max`) or smaller (`min`) is better.
        stopping_threshold: Stop as soon as the metric is at least this good; None for no such rule.
        patience: Stop after this many looks in a row without a better value; None for no such rule.
        min_delta: Difference by which a value must beat the best one to count as better.

    Raises:
        UserError: The run does not log `monitor`, or neither rule is set.
    """

    def __init__(
        self,
        monitor: str,
        mode: Literal["max", "min"] = "max",
        stopping_threshold: float | None = None,
        patience: int | None = None,
        min_delta: float = 0.0,
    ) -> None:
        if stopping_threshold is None and patience is None:
            raise UserError(
                f"EarlyStopping on `{monitor}` has neither `stopping_threshold` nor `patience`, so it would never "
                "stop; set one of them"
            )
        self.monitor = monitor
        self.mode = mode
        self.stopping_threshold = stopping_threshold
        self.patience = patience
        self.min_delta = min_delta
        self._best: float | None = None
        self._looks_without_better = 0
        self._seen = False

    @property
    def state_key(self) -> str:
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)

    def on_step_end(self, trainer: RunningTrainer, module: RLModule, step: int, metrics: Mapping[str, float]) -> None:
        if not self._of_validation:
            self._look(trainer, metrics)

    def on_validation_end(
        self, trainer: RunningTrainer, module: RLModule, step: int, metrics: Mapping[str, float]
    ) -> None:
        if self._of_validation:
            self._look(trainer, metrics)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "looks_without_better": self._looks_without_better}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best = state["best"]
        self._looks_without_better = state["looks_without_better"]

    @property
    def _of_validation(self) -> bool:
        return self.monitor.startswith("val")

    def _look(self, trainer: RunningTrainer, metrics: Mapping[str, float]) -> None:
        if self.monitor not in metrics:
            if self._seen:  # a mean over no entry is left out of a step's metrics
                return
            raise UserError(
                f"EarlyStopping monitors `{self.monitor}`, which this run does not log."
                f"{did_you_mean(self.monitor, metrics)} Logged: {', '.join(sorted(metrics))}"
            )
        self._seen = True
        value = metrics[self.monitor]
        if self._best is None or self._gain(value, self._best) > self.min_delta:
            self._best = value
            self._looks_without_better = 0
        else:
            self._looks_without_better += 1
        if self.stopping_threshold is not None and self._gain(value, self.stopping_threshold) >= 0:
            trainer.should_stop = True
        if self.patience is not None and self._looks_without_better >= self.patience:
            trainer.should_stop = True

    def _gain(self, value: float, over: float) -> float:
        """By how much `value` is better than `over`."""
        return value - over if self.mode == "max" else over - value
