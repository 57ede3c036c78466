"""What a module may ask of the step in progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from rlflow.environments.environment import Environment
from rlflow.rewards.reward import Reward
from rlflow.rollout.engine import Sampling
from rlflow.values.protocols import Written
from rlflow.values.ragged import Ragged
from rlflow.values.rollout import Rollout

AllRows = TypeVar("AllRows", Tensor, Ragged)


class StepContext(Protocol):
    """What a module may ask of the controller that runs it. Every method is called by all ranks of the node alike."""

    def policy(self, name: str | None) -> str: ...

    def generate(self, rows: Any, n: int, sampling: Sampling, longest: int, policy: str | None) -> Rollout: ...

    def converse(
        self,
        rows: Any,
        environment: Environment,
        n: int,
        sampling: Sampling,
        policy: str | None,
        players: Mapping[str, tuple[str, float]],
    ) -> Rollout: ...

    def encode(self, text: str) -> list[int]: ...

    @property
    def longest_prompt(self) -> int | None: ...

    def returned(self, rollout: Written, name: str, alone: bool) -> Tensor: ...

    def written(self, rows: Sequence[dict[str, Any]], template: str) -> Ragged: ...

    def score(self, reward: Reward, rollout: Written, name: str) -> tuple[Tensor, dict[str, Tensor]]: ...

    def log(self, name: str, x: Tensor, mask: Tensor | None) -> None: ...

    def kept(self, x: Tensor) -> Tensor | None: ...

    def of_each_shard(self, x: Tensor) -> Tensor: ...

    def dataset_rows(self, group: Tensor) -> Tensor: ...

    def remember(self, memory: str, group: Tensor, x: Tensor) -> None: ...

    def all_rows(self, x: AllRows) -> AllRows: ...
