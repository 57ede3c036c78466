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
    """The trainer as callbacks see it: its settings, each by its name, and how far the run is.

    Attributes:
        should_stop: Whether the run ends after this step; a callback may set it, on all ranks alike.
        global_step: Steps of the run that are done, those before a resume included. A step may be several updates.
        current_epoch: The pass over the training rows that the last step drew from, from 0. Where a module's
            `choose_prompts` chooses, counted as if it chose all of them.
        callback_metrics: The metrics of the last step and of the last validation, the same on every rank.
        global_rank: This process among all of the run, from 0; 0 before the run's processes have started.
        loggers: The loggers that the trainer was given.
        logger: The first of them; None without.
        print: Function that shows a line on the terminal, on rank 0 alone. Python's own writes to `logs/` in a run.
    """

    should_stop: bool = field(default=False, init=False)
    global_step: int = field(default=0, init=False)
    current_epoch: int = field(default=0, init=False)
    callback_metrics: dict[str, float] = field(default_factory=dict, init=False)
    global_rank: int = field(default=0, init=False)
    loggers: list[LoggerLike] = field(default_factory=list, init=False)
    logger: LoggerLike | None = field(default=None, init=False)
    print: Callable[[str], None] = field(default=print, init=False)

    @property
    def settings(self) -> Settings:
        """The settings alone, as they are now; the run reads those of its start."""
        return Settings(**{each.name: getattr(self, each.name) for each in fields(Settings)})

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0, which writes the run's results."""
        return self.global_rank == 0


class Callback:
    """Code of a user's own at fixed points of a run. Override the hooks that matter.

    Every rank calls its callbacks, with the same metrics, so a decision taken from them is the same on all ranks. A
    hook that differs between ranks (that writes a file, say) asks `trainer.is_global_zero`.

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
        """The name of the state in a checkpoint; override it where a run has several callbacks of one class."""
        return type(self).__qualname__

    def on_fit_start(self, trainer: RunningTrainer, module: RLModule) -> None:
        """Everything is loaded; no step has run."""

    def on_step_end(self, trainer: RunningTrainer, module: RLModule, step: int, metrics: dict[str, float]) -> None:
        """Step `step` (the first is 1) is done, not yet validated; `metrics` are its own, over all ranks.

        What a callback adds to `metrics` is logged with them.
        """

    def on_validation_end(
        self, trainer: RunningTrainer, module: RLModule, step: int, metrics: Mapping[str, float]
    ) -> None:
        """Validation after step `step` is done (0: before the first)."""

    def on_task_start(self, trainer: RunningTrainer, module: RLModule, task: str, step: int) -> None:
        """This rank is about to run a task of its plan, as `rlflow graph` prints it, for step `step` (from 0)."""

    def on_node_start(self, trainer: RunningTrainer, module: RLModule, node_id: str) -> None:
        """This rank is about to run a node."""

    def on_node_end(self, trainer: RunningTrainer, module: RLModule, node_id: str) -> None:
        """This rank ran a node."""

    def on_weight_sync(self, trainer: RunningTrainer, module: RLModule, policy: str, version: int) -> None:
        """The engine that generates with `policy` on this rank holds its weights of version `version`."""

    def on_fit_end(self, trainer: RunningTrainer, module: RLModule) -> None:
        """The last step is done, and saved."""

    def on_exception(self, trainer: RunningTrainer, module: RLModule, error: BaseException) -> None:
        """The run is ending with `error`, which is raised after this."""

    def state_dict(self) -> dict[str, Any]:
        """State of this callback for the checkpoint, JSON-able. Called on every rank; rank 0's state is stored."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave; not called where the checkpoint has nothing under `state_key`."""

    def _generate_state_key(self, **arguments: Any) -> str:
        """The class, with the arguments that distinguish callbacks of it, for `state_key`."""
        return f"{type(self).__qualname__}{arguments!r}"
