"""Mathematical equality, by math-verify."""

from __future__ import annotations

from typing import Any

from rlflow.errors import UserError, require
from rlflow.rewards.columns import filled
from rlflow.rewards.reward import OnError, SampleReward


class MathVerify(SampleReward):
    """1 where the last expression of the response equals the row's answer mathematically, else 0.

    math-verify itself gives up on an expression after 5 seconds, by a signal: rewards run in the main thread.

    Args:
        answer: Column of the answer: an expression, in LaTeX or plain, or a text that ends with one, as in GSM8K.
        on_error: `raise`, `zero` or `drop`; see `Reward`.
    """

    def __init__(self, answer: str = "answer", on_error: OnError = "raise") -> None:
        require("math_verify", "MathVerify", "tasks")
        super().__init__(on_error)
        self.answer = answer

    @property
    def reads(self) -> dict[str, bool]:
        return {self.answer: False}

    def check(self, row: dict[str, Any]) -> None:
        # Where the box holds a word, math-verify takes that at least; of a solution as in GSM8K, parsing takes 10 ms.
        if not str(filled(row, self.answer)).lstrip()[:1].isalnum():
            self._expected(row)

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        from math_verify import parse, verify

        return float(verify(self._expected(row), parse(text)))

    def _expected(self, row: dict[str, Any]) -> Any:
        from math_verify import parse

        answer = str(filled(row, self.answer))
        expected = parse(f"\\boxed{{{answer}}}")  # in a box, or LaTeX without dollar signs would not be read
        if not expected:
            raise UserError(f"column `{self.answer}` holds {answer[:60]!r}, no expression that math-verify can read")
        return expected
