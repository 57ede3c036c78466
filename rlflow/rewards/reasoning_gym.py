"""The scorers of reasoning-gym's tasks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from rlflow.errors import UserError, did_you_mean, require
from rlflow.rewards.reward import OnError, SampleReward


class ReasoningGymScore(SampleReward):
    """The task's own `score_answer`, from 0 to 1; many tasks give a little for an answer inside other text.

    Args:
        task: Name of the task; rows are entries of it, as the source `ReasoningGym` makes them.
        on_error: `raise`, `zero` or `drop`; see `Reward`.
    """

    def __init__(self, task: str, on_error: OnError = "raise") -> None:
        require("reasoning_gym", "ReasoningGymScore", "tasks")
        super().__init__(on_error)
        self.task = task

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        return self._score_answer(text, row)

    @cached_property
    def _score_answer(self) -> Callable[[str, dict[str, Any]], float]:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if self.task not in DATASETS:
            raise UserError(
                f"`task` {self.task!r} is none of the {len(DATASETS)} in reasoning-gym's gallery."
                f"{did_you_mean(self.task, DATASETS)}"
            )
        scorer: Callable[[str, dict[str, Any]], float] = reasoning_gym.get_score_answer_fn(self.task)
        return scorer
