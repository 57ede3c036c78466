"""The base class of callbacks, and the trainer as they see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rlflow.loggers.lightning import LoggerLike
from rlflow.module import RLModule
from rlflow.settings import Settings


@dataclass(eq=False)
class RunningTrainer(Settings):
    """The trainer as callbacks see it: its settings as attributes, and the progress of the run.

    Attributes:
        should_stop: Whether the run ends after this step. A callback may set it, but must do so on all ranks alike.
        global_step: Number of steps that are done, including steps before a resume. A step may have several updates.
        current_epoch: Number, from 0, of the pass over the training rows from which the last step drew. If a module
            overrides `choose_prompts`, epochs are counted as if it chose all rows.
        callback_metrics: The metrics of the last step and of the last validation, the same on every rank.
        checkpoints: Folders of the run's checkpoints, oldest first, and the value of `monitor` that each was saved
            with; set at the end of `fit`. A value is None if the checkpoint was saved without one.
        global_rank: Rank of this process in the run, from 0; 0 before the run's processes have started.
        loggers: The loggers that the trainer was given.
        logger: The first of the loggers; None if there is none.
        print: Function that prints a line on the terminal, only on rank 0. In a run, Python's `print` writes to
            `logs/`.
    """

    should_stop: bool = field(default=False, init=False)
    global_step: int = field(default=0, init=False)
    current_epoch: int = field(default=0, init=False)
    callback_metrics: dict[str, float] = field(default_factory=dict, init=False)
    checkpoints: dict[str, float | None] = field(default_factory=dict, init=False)
    global_rank: int = field(default=0, init=False)
    loggers: list[LoggerLike] = field(default_factory=list, init=False)
    logger: LoggerLike | None = field(default=None, init=False)
    print: Callable[[str], None] = field(default=print, init=False)

    @property
    def settings(self) -> Settings:
        """A copy of the settings as they are now. The run uses the settings that it had at its start."""
        return Settings(**{each.name: getattr(self, each.name) for each in fields(Settings)})

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0, which writes the run's results."""
        return self.global_rank == 0


class Callback:
    """A user's own code that runs at fixed points of a run. Override the hooks that you need.

    Every rank calls its callbacks with the same metrics, so a decision that follows from metrics is the same on all
    ranks. A hook for one rank only, such as a hook that writes a file, checks `trainer.is_global_zero`.

    Example:
        ```python
        class Notes(Callback):
            def on_step_end(self, trainer, module, step, metrics):
                if metrics["reward/mean"] > 0.9:
                    trainer.print(f"step {step} of {trainer.max_steps} is good")
        ```
    """

    @property
    def state_key(self) -> str:
        """The name of the state in a checkpoint; override it if a run has several callbacks of one class."""
        return type(self).__qualname__

    def on_fit_start(self, trainer: RunningTrainer, module: RLModule) -> None:
        """Called when everything is loaded, before the first step."""

    def on_step_end(self, trainer: RunningTrainer, module: RLModule, step: int, metrics: dict[str, float]) -> None:
        """Called when step `step` (the first is 1) is done, before its validation.

        `metrics` are of this step, over all ranks. If a callback adds values to `metrics`, they are logged too.
        """

    def on_validation_end(
        self, trainer: RunningTrainer, module: RLModule, step: int, metrics: Mapping[str, float]
    ) -> None:
        """Called when the validation after step `step` is done; `step` is 0 for that before the first step."""

    def on_task_start(self, trainer: RunningTrainer, module: RLModule, task: str, step: int) -> None:
        """Called before this rank runs a task of its plan, as `rlflow graph` prints it, for step `step`."""

    def on_node_start(self, trainer: RunningTrainer, module: RLModule, node_id: str) -> None:
        """Called before this rank runs a node."""

    def on_node_end(self, trainer: RunningTrainer, module: RLModule, node_id: str) -> None:
        """Called after this rank ran a node."""

    def on_weight_sync(self, trainer: RunningTrainer, module: RLModule, policy: str, version: int) -> None:
        """Called when the engine of `policy` on this rank holds version `version` of the policy's weights."""

    def on_fit_end(self, trainer: RunningTrainer, module: RLModule) -> None:
        """Called when the last step is done and its model or checkpoint is saved."""

    def on_exception(self, trainer: RunningTrainer, module: RLModule, error: BaseException) -> None:
        """Called when the run ends with `error`, which is raised after this hook."""

    def state_dict(self) -> dict[str, Any]:
        """State of this callback for a checkpoint, JSON-able. Called on every rank; the state of rank 0 is stored."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`; not called if the checkpoint has no state under `state_key`."""

    def _generate_state_key(self, **arguments: Any) -> str:
        """The class, with the arguments that distinguish callbacks of it, for `state_key`."""
        return f"{type(self).__qualname__}{arguments!r}"
