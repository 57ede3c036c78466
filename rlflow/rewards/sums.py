"""The response is the value of a sum, which need not come from a dataset."""

from __future__ import annotations

import re
from typing import Any

from rlflow.rewards.columns import filled
from rlflow.rewards.reward import OnError, SampleReward

_SUM = re.compile(r"\d{1,9}(?: [+-] \d{1,9})+")


class SumValue(SampleReward):
    """1 where the response is the value of the sum in the row, such as `5 + 9 - 2`, else 0; what is no sum has none.

    Args:
        question: Column of the sum; dots step into a column.
        on_error: `raise`, `zero` or `drop`; see `Reward`.
    """

    def __init__(self, question: str = "question", on_error: OnError = "raise") -> None:
        super().__init__(on_error)
        self.question = question

    @property
    def reads(self) -> dict[str, bool]:
        return {self.question: False}

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        question = str(filled(row, self.question))
        if not _SUM.fullmatch(question):
            return 0.0
        value = sum(int(term) for term in re.findall(r"[+-]?\d+", question.replace(" ", "")))
        return float(text == str(value))
