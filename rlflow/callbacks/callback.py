"""What a callback is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rlflow.loggers.logger import Logger
from rlflow.module import RLModule
from rlflow.settings import Settings

if TYPE_CHECKING:
    from lightning.fabric.loggers.logger import Logger as FabricLogger


class RunningTrainer(Protocol):
    """What a callback sees of the `Trainer`, whose documentation says what each is."""

    should_stop: bool

    @property
    def settings(self) -> Settings: ...

    @property
    def global_step(self) -> int: ...

    @property
    def current_epoch(self) -> int: ...

    @property
    def global_rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def is_global_zero(self) -> bool: ...

    @property
    def callback_metrics(self) -> Mapping[str, float]: ...

    @property
    def logger(self) -> Logger | FabricLogger | None: ...

    @property
    def loggers(self) -> Sequence[Logger | FabricLogger]: ...


class Callback:
    """Code of a user's own at fixed points of a run. Override the hooks that matter.

    Every rank calls its callbacks, with the same metrics, so a decision taken from them is the same on all ranks. A
    hook that differs between ranks (that writes a file, say) asks `trainer.is_global_zero`.
    """

    @property
    def state_key(self) -> str:
        """Under which a checkpoint keeps the state; override it where a run has several callbacks of one class."""
        return type(self).__qualname__

    def on_fit_start(self, trainer: RunningTrainer, module: RLModule) -> None:
        """Everything is loaded; no step has run."""

    def on_step_end(self, trainer: RunningTrainer, module: RLModule, step: int, metrics: Mapping[str, float]) -> None:
        """Step `step` (the first is 1) is done, not yet validated; `metrics` are its own, over all ranks."""

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
        """What a checkpoint keeps of this callback, JSON-able; called on every rank, and rank 0's is kept."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave; not called where the checkpoint has nothing under `state_key`."""

    def _generate_state_key(self, **arguments: Any) -> str:
        """The class with what tells callbacks of it apart, for `state_key`."""
        return f"{type(self).__qualname__}{arguments!r}"
