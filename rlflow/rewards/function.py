"""A reward that is a user's function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rlflow.dotted_path import function_at
from rlflow.errors import UserError
from rlflow.rewards.reward import OnError, SampleReward
from rlflow.worker import Limits, WorkerPool


class CallableReward(SampleReward):
    """What `function(response, row)` returns: a number, or a dict of names to numbers, whose sum is the score.

    Args:
        function: Dotted path such as `my_rewards.brevity`, or the function itself. Of a dict each part is logged, and
            nodes read it by `self.reward_parts`; inside a `WeightedSum` the sum alone is a part.
        on_error: `raise`, `zero`, `mask` or `skip`; see `SampleReward`.
        seconds: What a sample may take. The function then runs in a process of its own that can be killed, and can
            neither hang the run nor end it; None for in the rank's own process, which is faster and has no limit.
        workers: How many such processes a rank has.
        memory_mb: What each of them may take of memory; needs `seconds`.
    """

    def __init__(
        self,
        function: str | Callable[[str, dict[str, Any]], float | Mapping[str, float]],
        on_error: OnError = "raise",
        seconds: float | None = None,
        workers: int = 1,
        memory_mb: int = 4096,
    ) -> None:
        super().__init__(on_error, at_once=workers)
        self.function = function
        if seconds is None:
            if workers != 1:
                raise UserError(
                    f"`workers` is {workers} without `seconds`, and only what has a limit runs in one; set it"
                )
            self._call = _function(function) if isinstance(function, str) else function
        elif isinstance(function, str):
            _function(function)
            pool = WorkerPool(Limits(seconds=seconds, memory_mb=memory_mb), workers)
            self._call = partial(pool.function, function)
        else:
            raise UserError(
                f"`seconds` is {seconds:g}, and `function` is {function!r:.60}, which no other process can import; give"
                " its dotted path"
            )

    def score_sample(self, text: str, row: dict[str, Any]) -> float | Mapping[str, float]:
        return self._call(text, row)

    def __str__(self) -> str:
        return f"reward `{self.function if isinstance(self.function, str) else self.function.__name__}`"


def _function(path: str) -> Callable[[str, dict[str, Any]], float]:
    return function_at(path, f"`function` is {path!r}")
