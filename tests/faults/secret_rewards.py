"""A reward that is given secrets, and tells them in its errors; also in the environment of the ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rlflow.rewards.reward import SampleReward


class Served(SampleReward):
    """Scores lengths, and fails on each second sample.

    Args:
        url: With a login and a signature.
        api_key: Of the service.
        headers: Of a request.
        stores: Of more services.
        note: A text, in which a token stands.
        names: Likewise, many.
        hf_token: One more.
        password: One more.
        at_end: Fails for good at the last step.
    """

    def __init__(
        self,
        url: str = "",
        api_key: str = "",
        headers: Mapping[str, str] | None = None,
        stores: Sequence[Mapping[str, Any]] = (),
        note: str = "",
        names: Sequence[str] = (),
        hf_token: str = "",
        password: str = "",
        at_end: bool = False,
    ) -> None:
        super().__init__(on_error="raise" if at_end else "zero")
        self.said = f"{url} answered 401 to api_key={api_key} with {headers}, {stores}; {note} {names}"
        self.said += f" hf_token: {hf_token}, password={password!r}, token={os.environ['PLANTED_TOKEN']}"
        self.said += f" and {os.environ['PLANTED_SHAPE']}"
        self.scored = 0

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        self.scored += 1
        if self.scored % 2 == 0:
            raise ConnectionError(f"{self.said}\nrlflow: error: forged \x1b[31mline")
        return float(len(text))
