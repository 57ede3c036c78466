"""The response is the answer, or it is not."""

from __future__ import annotations

from typing import Any

from rlflow.rewards.columns import filled
from rlflow.rewards.reward import OnError, SampleReward


class ExactMatch(SampleReward):
    """1 where the response equals the row's answer, whitespace at the ends aside, else 0.

    Args:
        answer: Column of the answer.
        on_error: `raise`, `zero` or `drop`; see `Reward`.
    """

    def __init__(self, answer: str = "answer", on_error: OnError = "raise") -> None:
        super().__init__(on_error)
        self.answer = answer

    @property
    def reads(self) -> dict[str, bool]:
        return {self.answer: False}

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        return float(text.strip() == str(filled(row, self.answer)).strip())
