"""The reward of the trial run: one that random responses differ in."""

from __future__ import annotations

from typing import Any

from rlflow.rewards.reward import SampleReward


class ShareOfDigits(SampleReward):
    """How much of a response are digits, from 0 to 1."""

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        return sum(each.isdigit() for each in text) / max(1, len(text))
