"""Stop a run by rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from rlflow.callbacks.callback import Callback, RunningTrainer
from rlflow.errors import UserError, did_you_mean
from rlflow.module import RLModule
from rlflow.settings import VALIDATION


class EarlyStopping(Callback):
    """Ends the run once a metric is good enough, or no longer gets better.

    A metric of validation (`val/...`, `val_...`) is checked after each validation, any other metric after each step.

    Example:
        `EarlyStopping("val/accuracy", mode="max", patience=None, stopping_threshold=0.8)` ends the run after the first
        validation with an accuracy of 0.8 or more, `EarlyStopping("actor/kl", patience=50)` after 50 steps in a row
        without a lower KL.

    Args:
        monitor: Name of the metric.
        min_delta: Difference by which a value must beat the best value to count as better.
        patience: Stop after this many checks in a row without a better value; None for no such rule.
        verbose: Whether a line is printed when the run ends, and for each better value.
        mode: Whether a smaller (`min`) or a larger (`max`) value is better.
        strict: Whether a metric that the run does not log is an error. If not, the next check looks for it again.
        check_finite: Stop as soon as the metric is infinite or NaN.
        stopping_threshold: Stop as soon as the metric is at least this good; None for no such rule.
        divergence_threshold: Stop as soon as the metric is worse than this; None for no such rule.

    Raises:
        UserError: The run does not log `monitor`, no rule is set, or there is no such `mode`.
    """

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int | None = 3,
        verbose: bool = False,
        mode: Literal["min", "max"] = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
    ) -> None:
        if patience is None and stopping_threshold is None and divergence_threshold is None:
            raise UserError(
                f"EarlyStopping on `{monitor}` has no `patience`, `stopping_threshold` or `divergence_threshold`, so it"
                " would never stop; set one of them"
            )
        if mode not in ("min", "max"):
            raise UserError(f"`mode` of EarlyStopping is {mode!r}; give min or max")
        self.monitor = monitor
        self.min_delta = min_delta
        self.patience = patience
        self.verbose = verbose
        self.mode = mode
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self._best: float | None = None
        self._looks_without_better = 0

    @property
    def state_key(self) -> str:
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)

    def on_fit_start(self, trainer: RunningTrainer, module: RLModule) -> None:
        if not trainer.global_step:  # another run of this trainer, which resumes none
            self._best, self._looks_without_better = None, 0

    def on_step_end(self, trainer: RunningTrainer, module: RLModule, step: int, metrics: dict[str, float]) -> None:
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
        return self.monitor.startswith(VALIDATION)

    def _look(self, trainer: RunningTrainer, metrics: Mapping[str, float]) -> None:
        if self.monitor not in metrics:
            was_seen = self._best is not None or self._looks_without_better > 0
            if was_seen or not self.strict:  # a mean over no entry is left out of a step's metrics
                return
            raise UserError(
                f"EarlyStopping monitors `{self.monitor}`, which this run does not log."
                f"{did_you_mean(self.monitor, metrics)} If a later step does, as after `start_step`, set `strict` to"
                f" false. Logged: {', '.join(sorted(metrics))}"
            )
        value = metrics[self.monitor]
        reason = self._reason(value)
        if trainer.fast_dev_run:  # which takes all of its steps
            return
        trainer.should_stop |= reason is not None
        if self.verbose and (reason is not None or not self._looks_without_better):
            trainer.print(f"EarlyStopping: `{self.monitor}` is {value:.4g}, {reason or 'the best so far'}")

    def _reason(self, value: float) -> str | None:
        """Reason to stop the run after this value of the metric; None if the run should continue."""
        if math.isfinite(value) and (self._best is None or self._gain(value, self._best) > self.min_delta):
            self._best = value
            self._looks_without_better = 0
        else:
            self._looks_without_better += 1
        if self.check_finite and not math.isfinite(value):
            return "which is not finite"
        if self.stopping_threshold is not None and self._gain(value, self.stopping_threshold) >= 0:
            return f"and {self.stopping_threshold:g} was to be reached"
        if self.divergence_threshold is not None and self._gain(value, self.divergence_threshold) < 0:
            return f"which is worse than {self.divergence_threshold:g}"
        if self.patience is not None and self._looks_without_better >= self.patience:
            return f"and {self._looks_without_better} looks in a row were not better than {self._best}"
        return None

    def _gain(self, value: float, over: float) -> float:
        """Amount by which `value` is better than `over`."""
        return value - over if self.mode == "max" else over - value
