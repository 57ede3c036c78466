"""Whether a response is the right answer: word for word, as mathematics, as a sum, or by a task's own scorer."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any

from rlflow.errors import UserError, did_you_mean, require
from rlflow.rewards.reward import OnError, SampleReward, read_column

_SUM = re.compile(r"\d{1,9}(?: [+-] \d{1,9})+")


class ExactMatch(SampleReward):
    """1 if the response equals the row's answer, else 0. Whitespace at the ends is ignored.

    Args:
        answer: Column of the answer.
        on_error: `raise`, `zero` or `drop`; see `Reward`.
    """

    def __init__(self, answer: str = "answer", on_error: OnError = "raise") -> None:
        super().__init__(on_error)
        self.answer = answer
        self.reads = {answer: False}

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        return float(text.strip() == str(read_column(row, self.answer)).strip())

    def gold_of(self, row: dict[str, Any]) -> str | None:
        return str(read_column(row, self.answer))


class MathVerify(SampleReward):
    """1 if the last expression of the response equals the row's answer mathematically, else 0.

    math-verify gives up on an expression after 5 seconds, by a signal. This works because rewards run in the main
    thread.

    Args:
        answer: Column of the answer: an expression in LaTeX or plain text, or a text that ends with one, as in GSM8K.
        on_error: `raise`, `zero` or `drop`; see `Reward`.
    """

    def __init__(self, answer: str = "answer", on_error: OnError = "raise") -> None:
        require("math_verify", "MathVerify", "tasks")
        super().__init__(on_error)
        self.answer = answer
        self.reads = {answer: False}

    def check(self, row: dict[str, Any]) -> None:
        # Where the box holds a word, math-verify takes that at least; of a solution as in GSM8K, parsing takes 10 ms.
        if not str(read_column(row, self.answer)).lstrip()[:1].isalnum():
            self._expected(row)

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        from math_verify import parse, verify

        return float(verify(self._expected(row), parse(text)))

    def gold_of(self, row: dict[str, Any]) -> str | None:
        return f"\\boxed{{{read_column(row, self.answer)}}}"

    def _expected(self, row: dict[str, Any]) -> Any:
        answer = str(read_column(row, self.answer))
        expected = _boxed(answer)
        if not expected:
            raise UserError(
                f"column `{self.answer}` holds {answer[:60]!r}, no expression that math-verify can read; correct or"
                " remove the row"
            )
        return expected


@lru_cache(maxsize=1024)  # a group's responses have one answer
def _boxed(answer: str) -> Any:
    """An answer as math-verify parses it: put in a box, since LaTeX without dollar signs would not be read."""
    from math_verify import parse

    return parse(f"\\boxed{{{answer}}}")


class SumValue(SampleReward):
    """1 if the response is the value of the sum in the row, such as `5 + 9 - 2`, else 0; 0 if the row has no sum.

    Args:
        question: Column of the sum; dots step into a column. A column that has another text gives 0, not an error.
        on_error: `raise`, `zero` or `drop`; see `Reward`.
    """

    def __init__(self, question: str = "question", on_error: OnError = "raise") -> None:
        super().__init__(on_error)
        self.question = question
        self.reads = {question: False}

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        question = str(read_column(row, self.question))
        if not _SUM.fullmatch(question):
            return 0.0
        value = sum(int(term) for term in re.findall(r"[+-]?\d+", question.replace(" ", "")))
        return float(text == str(value))


class ReasoningGymScore(SampleReward):
    """The score of the task's own `score_answer`, from 0 to 1. Many tasks give a small score for an answer in a text.

    Args:
        task: Name of the task. Rows are entries of this task, as the source `ReasoningGym` makes them.
        on_error: `raise`, `zero` or `drop`; see `Reward`.
    """

    def __init__(self, task: str, on_error: OnError = "raise") -> None:
        require("reasoning_gym", "ReasoningGymScore", "tasks")
        super().__init__(on_error)
        self.task = task

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        return self._score_answer(text, row)

    def gold_of(self, row: dict[str, Any]) -> str | None:
        answer = row.get("answer")
        return answer if isinstance(answer, str) else None

    @cached_property
    def _score_answer(self) -> Callable[[str, dict[str, Any]], float]:
        return scorer_of(self.task)


def scorer_of(task: str) -> Callable[[str, dict[str, Any]], float]:
    """The scorer of a task of reasoning-gym, of an answer and an entry of the task.

    Raises:
        UserError: There is no such task.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise UserError(
            f"`task` {task!r} is none of the {len(DATASETS)} in reasoning-gym's gallery.{did_you_mean(task, DATASETS)}"
        )
    scorer: Callable[[str, dict[str, Any]], float] = reasoning_gym.get_score_answer_fn(task)
    return scorer
