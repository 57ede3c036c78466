"""A reward that is a user's function."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, cast

from rlflow.errors import UserError, did_you_mean, one_line
from rlflow.rewards.reward import OnError, SampleReward


class CallableReward(SampleReward):
    """What `function(response, row)` returns: a number, or a dict of names to numbers, whose sum is the score.

    Args:
        function: Dotted path such as `my_rewards.brevity`, or the function itself. Of a dict each part is logged, and
            nodes read it by `self.reward_parts`; inside a `WeightedSum` the sum alone is a part.
        on_error: `raise` or `zero`; see `SampleReward`.
    """

    def __init__(
        self,
        function: str | Callable[[str, dict[str, Any]], float | Mapping[str, float]],
        on_error: OnError = "raise",
    ) -> None:
        super().__init__(on_error)
        self.function = function
        self._call = imported(function) if isinstance(function, str) else function

    def score_sample(self, text: str, row: dict[str, Any]) -> float | Mapping[str, float]:
        return self._call(text, row)

    def __str__(self) -> str:
        return f"reward `{self.function if isinstance(self.function, str) else self.function.__name__}`"


def imported(path: str) -> Callable[[str, dict[str, Any]], float]:
    """The function at a dotted path.

    Raises:
        UserError: There is no such module, or it has no such function.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise UserError(f"`function` {path!r} names no module; write it as module.function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(
            f"`function` {path!r} cannot be imported ({one_line(error)}); check the path and its folder"
        ) from error
    function = vars(module).get(name)
    if not callable(function):
        raise UserError(
            f"`function` {path!r}: {module_name} has no function {name!r}.{did_you_mean(name, vars(module))}"
        )
    return cast(Callable[[str, dict[str, Any]], float], function)
