"""A reward that is given secrets, also in the environment of the ranks, and whose errors act on a terminal."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rlflow.rewards.reward import SampleReward

OF_FIRST_STEP = 4  # samples that a rank scores in it


class Served(SampleReward):
    """Scores lengths, and fails on each second sample.

    Args:
        api_key: Of the service.
        headers: Of a request.
        stores: Of more services.
        command: That starts the service.
        hf_token: One more.
        password: One more.
        at_end: Fails for good after the first step.
    """

    def __init__(
        self,
        api_key: str = "",
        headers: Mapping[str, str] | None = None,
        stores: Sequence[Mapping[str, Any]] = (),
        command: Sequence[str] = (),
        hf_token: str = "",
        password: str = "",
        at_end: bool = False,
    ) -> None:
        super().__init__(on_error="raise" if at_end else "zero")
        assert all([api_key, headers, stores, command, hf_token, password, os.environ["PLANTED_TOKEN"]])
        self.scored = 0
        self.at_end = at_end

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        self.scored += 1
        if self.scored % 2 == 0 and (not self.at_end or self.scored > OF_FIRST_STEP):
            raise ConnectionError("the service answered 401\nrlflow: error: forged \x1b[31mline")
        return float(len(text))
