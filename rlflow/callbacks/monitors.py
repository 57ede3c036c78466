"""Metrics that a run does not log by itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from rlflow.callbacks.callback import Callback, RunningTrainer
from rlflow.errors import UserError
from rlflow.models.optimizer import GroupedOptimizer
from rlflow.module import RLModule, handles


class LearningRateMonitor(Callback):
    """Logs momentum and weight decay. The learning rate is always logged, as `actor/lr`, with or without this callback.

    With several groups of weights the names end in `/pg1`, `/pg2`, ..., as in Lightning.

    Args:
        logging_interval: Only `step`; None is `step` too.
        log_momentum: Log `<role>/momentum`: AdamW's first beta, or the momentum of SGD.
        log_weight_decay: Log `<role>/weight_decay`.
    """

    def __init__(
        self,
        logging_interval: Literal["step"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        if logging_interval not in (None, "step"):
            raise UserError(
                f"`logging_interval` of LearningRateMonitor is {logging_interval!r}; a run logs by step: leave it out"
            )
        self.log_momentum, self.log_weight_decay = log_momentum, log_weight_decay

    def on_fit_start(self, trainer: RunningTrainer, module: RLModule) -> None:
        optimizers = {role: handle.optimizer for role, handle in handles(module).items()}
        self._groups = {
            role: each.given.param_groups if isinstance(each, GroupedOptimizer) else [each.small().defaults]
            for role, each in optimizers.items()
            if each is not None
        }

    def on_step_end(self, trainer: RunningTrainer, module: RLModule, step: int, metrics: dict[str, float]) -> None:
        for role, groups in self._groups.items():
            for number, options in enumerate(groups, start=1):
                end = "" if len(groups) == 1 else f"/pg{number}"
                if self.log_momentum:
                    momentum = options["betas"][0] if "betas" in options else options.get("momentum", 0.0)
                    metrics[f"{role}/momentum{end}"] = float(momentum)
                if self.log_weight_decay:
                    metrics[f"{role}/weight_decay{end}"] = float(options.get("weight_decay", 0.0))


class ThroughputMonitor(Callback):
    """Logs rates per second over a window of steps, for all ranks together. Validation and waits count as time.

    `train/batches_per_sec` counts steps. If something is sampled, `train/samples_per_sec` counts samples, and
    `train/items_per_sec` counts the tokens that the policies wrote. For a rate per GPU, divide by the number of ranks.

    Args:
        batch_size_fn: Not used: a run counts its samples.
        length_fn: Not used: a run counts its tokens.
        window_size: Number of last steps over which rates are computed.
        separator: Text between `train` and the name of the rate.
    """

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int] | None = None,
        length_fn: Callable[[Any], int] | None = None,
        window_size: int = 100,
        separator: str = "/",
    ) -> None:
        for name, value in {"batch_size_fn": batch_size_fn, "length_fn": length_fn}.items():
            if value is not None:
                raise UserError(f"`{name}` of ThroughputMonitor is given, and a run counts its samples; leave it out")
        if window_size < 2:
            raise UserError(f"`window_size` of ThroughputMonitor is {window_size}; give 2 steps or more")
        self.separator = separator
        self._window_size = window_size
        self._begin()

    def on_fit_start(self, trainer: RunningTrainer, module: RLModule) -> None:
        self._begin()

    def on_step_end(self, trainer: RunningTrainer, module: RLModule, step: int, metrics: dict[str, float]) -> None:
        nodes = [name.removesuffix("/tokens") for name in metrics if name.endswith("/tokens")]
        nodes = [node for node in nodes if f"{node}/responses" in metrics]
        samples, tokens = (sum(metrics[f"{node}/{what}"] for node in nodes) for what in ("responses", "tokens"))
        _, steps, samples_before, tokens_before = self._totals[-1]
        now = (metrics["time/elapsed"], steps + 1, samples_before + samples, tokens_before + tokens)
        self._totals.append(now)
        first = self._totals[0]
        seconds = now[0] - first[0]
        for place, name in enumerate(("batches_per_sec", "samples_per_sec", "items_per_sec"), start=1):
            if now[place] > 0:
                metrics[f"train{self.separator}{name}"] = (now[place] - first[place]) / seconds

    def _begin(self) -> None:
        # Seconds, steps, samples and tokens up to the end of each step.
        self._totals = deque([(0.0, 0.0, 0.0, 0.0)], maxlen=self._window_size)
