"""Callbacks of Lightning that are settings of the trainer here, which reads them when it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

from rlflow.callbacks.callback import Callback, RunningTrainer
from rlflow.callbacks.timer import Duration, seconds_of
from rlflow.errors import UserError
from rlflow.module import RLModule
from rlflow.settings import Settings


class Preset(Callback):
    """A callback that sets settings of the trainer."""

    def settings(self, trainer: Settings) -> Mapping[str, Any]:
        """The settings by name, for a trainer that has its other settings."""
        return {}

    def set_in(self, trainer: Settings) -> None:
        """Set them in a trainer.

        Raises:
            UserError: The trainer was given one of them, or another callback sets it too.
        """
        defaults = {each.name: each.default for each in fields(Settings)}
        for name, value in self.settings(trainer).items():
            if (given := getattr(trainer, name)) != defaults[name]:
                raise UserError(
                    f"`trainer.{name}` is {given!r}, and the callback {type(self).__name__} sets it to {value!r}; leave"
                    " one of them out"
                )
            setattr(trainer, name, value)


class ModelCheckpoint(Preset):
    """Sets when checkpoints are written and which stay: the trainer's `save_...`, `monitor`, `mode`, as in Lightning.

    Checkpoints are in `checkpoint/` of the run's folder. The last two are always kept, since one may be damaged.

    Args:
        monitor: The metric by which checkpoints are compared; None to keep only the last checkpoints.
        mode: Whether a smaller (`min`) or a larger (`max`) value is better.
        save_top_k: Number of best checkpoints that are kept, or -1 for all.
        save_last: Number of last checkpoints that are kept, 2 or more. True, False and None keep the trainer's number.
        every_n_train_steps: Steps between checkpoints. If neither this nor `train_time_interval` is given, checkpoints
            are written every `val_check_interval` steps.
        train_time_interval: Time after which the next step is followed by a checkpoint, in the forms of Timer's
            `duration`.
        dirpath: Not used, like all arguments below. Checkpoints are in the run's folder.
        filename: A checkpoint is named after its step.
        verbose: `checkpoint/` shows what was saved.
        save_on_exception: A run that failed resumes from its last checkpoint.
        save_weights_only: The model is written with each checkpoint.
        auto_insert_metric_name: A checkpoint is named after its step.
        every_n_epochs: A run is counted in steps.
        save_on_train_epoch_end: A run is counted in steps.
        enable_version_counter: A checkpoint is named after its step.

    Attributes:
        best_model_path: Folder of the best checkpoint by `monitor`, or of the last one without `monitor`; set at the
            end of `fit`. `load_from_checkpoint` of a module reads it. Empty if there is none.
        best_model_score: The value of `monitor` of that checkpoint; None if no checkpoint was saved.
        best_k_models: Folders of the checkpoints that were kept, and the value of `monitor` of each.
        last_model_path: Folder of the last checkpoint.

    Raises:
        UserError: An argument that is not used is given, `save_top_k` is 0, or `save_top_k` needs a `monitor`.
    """

    def __init__(
        self,
        dirpath: str | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | int | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: Literal["min", "max"] = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: Duration | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
    ) -> None:
        named, counted = "a checkpoint is named after its step", "a run is counted in steps; give `every_n_train_steps`"
        for name, value, default, instead in (
            ("dirpath", dirpath, None, "checkpoints are in `checkpoint/` of `trainer.run_dir`"),
            ("filename", filename, None, named),
            ("verbose", verbose, False, "`checkpoint/` shows what was saved"),
            ("save_on_exception", save_on_exception, False, "a run that failed resumes from its last checkpoint"),
            ("save_weights_only", save_weights_only, False, "the model is written to `model/` with each checkpoint"),
            ("auto_insert_metric_name", auto_insert_metric_name, True, named),
            ("every_n_epochs", every_n_epochs, None, counted),
            ("save_on_train_epoch_end", save_on_train_epoch_end, None, counted),
            ("enable_version_counter", enable_version_counter, True, named),
        ):
            if value != default:
                raise UserError(f"`{name}` of ModelCheckpoint is {value!r}, and {instead}; leave it out")
        if save_top_k == 0:
            raise UserError("`save_top_k` of ModelCheckpoint is 0, so it saves nothing; leave the callback out")
        if monitor is None and save_top_k not in (1, -1):
            raise UserError(
                f"`save_top_k` of ModelCheckpoint is {save_top_k} and `monitor` is not set, so no checkpoint is better"
                " than another; name a metric"
            )
        self.monitor, self.mode, self.save_top_k, self.save_last = monitor, mode, save_top_k, save_last
        self.every_n_train_steps, self.train_time_interval = every_n_train_steps, train_time_interval
        self._forget()

    def _forget(self) -> None:
        self.best_model_path = self.last_model_path = ""
        self.best_model_score: float | None = None
        self.best_k_models: dict[str, float] = {}

    def on_fit_start(self, trainer: RunningTrainer, module: RLModule) -> None:
        """Forget the checkpoints of an earlier run."""
        self._forget()

    def on_fit_end(self, trainer: RunningTrainer, module: RLModule) -> None:
        """Note which checkpoints there are."""
        sign = 1 if trainer.mode == "max" else -1
        self.last_model_path = self.best_model_path = next(reversed(trainer.checkpoints), "")
        values = {path: math.nan if value is None else value for path, value in trainer.checkpoints.items()}
        self.best_k_models = {path: value for path, value in values.items() if not math.isnan(value)}
        if trainer.monitor is not None and not self.best_k_models:
            self.best_model_path = ""
        elif self.best_k_models:  # the later of two equal ones, as `ckpt_path: best` takes it
            self.best_model_path = max(reversed(self.best_k_models), key=lambda path: sign * self.best_k_models[path])
        self.best_model_score = self.best_k_models.get(self.best_model_path)

    def settings(self, trainer: Settings) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        if self.monitor is not None:
            found |= {"monitor": self.monitor, "mode": self.mode, "save_top_k": self.save_top_k}
        elif self.save_top_k == -1:
            found["save_top_k"] = -1
        if self.save_last is not None and not isinstance(self.save_last, bool):
            found["save_last"] = self.save_last
        if self.train_time_interval is not None:
            found["save_every_seconds"] = seconds_of(self.train_time_interval, "`train_time_interval`")
        if self.every_n_train_steps is not None:
            found["save_every_n_steps"] = self.every_n_train_steps
        elif self.train_time_interval is None:
            if trainer.val_check_interval is None:
                raise UserError(
                    "ModelCheckpoint does not say when to save, and `trainer.val_check_interval` is not set; give"
                    " `every_n_train_steps` or `train_time_interval`"
                )
            found["save_every_n_steps"] = trainer.val_check_interval
        return found


class SampleTable(Preset):
    """Sets how many samples loggers get, and how often: the trainer's `log_samples` and `log_samples_every_n_steps`.

    W&B shows samples as a table. `rlflow samples` reads them from `samples.jsonl` of the run's folder.

    Args:
        every_n_steps: Log samples once in this number of steps.
        n: Maximum number of samples that are logged in one step.
    """

    def __init__(self, every_n_steps: int = 1, n: int = 4) -> None:
        self.every_n_steps, self.n = every_n_steps, n

    def settings(self, trainer: Settings) -> Mapping[str, Any]:
        return {"log_samples": self.n, "log_samples_every_n_steps": self.every_n_steps}
