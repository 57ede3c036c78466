"""What a callback is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlflow.trainer import Trainer


class Callback:
    """Code of a user's own at fixed points of a run. Override the hooks that matter.

    Every rank calls its callbacks, with the same metrics, so a decision taken from them is the same on all ranks. A
    hook that differs between ranks (that writes a file, say) asks for its rank itself.
    """

    def on_fit_start(self, trainer: Trainer) -> None:
        """Everything is loaded; no step has run."""

    def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        """Step `step` (the first is 1) is done, not yet validated; `metrics` are its own, over all ranks."""

    def on_validation_end(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        """Validation after step `step` is done (0: before the first)."""

    def on_task_start(self, task: str, step: int) -> None:
        """This rank is about to run a task of its plan, as `rlflow graph` prints it, for step `step` (from 0)."""

    def on_node_start(self, node_id: str) -> None:
        """This rank is about to run a node."""

    def on_node_end(self, node_id: str) -> None:
        """This rank ran a node."""

    def on_weight_sync(self, version: int) -> None:
        """The rollout engine of this rank holds the weights of policy version `version`."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """The last step is done, and saved."""

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """The run is ending with `error`, which is raised after this."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this callback, JSON-able."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
