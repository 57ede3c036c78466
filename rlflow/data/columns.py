"""What stands in a row's columns: a text, messages, or what a reward reads."""

from __future__ import annotations

from typing import Any

from rlflow.data.template import column_of
from rlflow.errors import UserError
from rlflow.rewards.reward import Reward


def text_in(value: Any, column: str, place: str) -> str:
    """The value of a column, which is a text.

    Raises:
        UserError: It is none.
    """
    if not isinstance(value, str):
        raise UserError(f"{place}: column `{column}` is {value!r:.60}, not a text; mend or remove the row")
    return value


def is_message(message: Any) -> bool:
    """Whether it has a role and a content, which is null beside calls of tools alone."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
        return False
    content = message["content"]
    return isinstance(content, str | list) or (content is None and bool(message.get("tool_calls")))


def says_nothing(prompt: Any) -> bool:
    """Whether a prompt, which is a text or messages, has blanks alone; an empty list says what is wrong by itself."""
    if isinstance(prompt, list):
        return bool(prompt) and all(is_message(each) and says_nothing(each["content"]) for each in prompt)
    return isinstance(prompt, str) and not prompt.strip()


def check_scored(row: dict[str, Any], reward: Reward | None, place: str) -> None:
    """Refuse a row that a reward could not score.

    Args:
        row: Of the dataset.
        reward: Which says what it reads, see `Reward.reads` and `Reward.check`; None where none scores.
        place: Of the row, for errors.

    Raises:
        UserError: The row lacks a column, or has null in it, or what the reward cannot read.
    """
    if reward is None:
        return
    for name, may_be_null in reward.reads.items():
        try:
            value = column_of(row, name, place, ", which the reward reads")
        except UserError as error:
            raise UserError(f"{error} Mend or remove the row, or name another column in the reward") from error
        if value is None and not may_be_null:
            raise UserError(
                f"{place}: column `{name}`, which the reward reads, is null, so no response could be right; write its"
                " value, or remove the row"
            )
    try:
        reward.check(row)
    except UserError as error:
        raise UserError(f"{place}: {error}; mend or remove the row") from error
