"""An environment for `turns.py`, and a reward for `early_scores.py`, that take their time.

Workers import this, so it imports the standard library alone.
"""

from __future__ import annotations

import math
import random
import time
from typing import Any

SPREAD = 1.0  # of the logarithm of a delay


class Delayed:
    """Answers each message after a time that follows from the row and the turn."""

    def reset(self, place: int, turns: int, median_s: float) -> None:
        self.place, self.turns, self.median_s = place, turns, median_s
        self.turn = 0

    def initial_observation(self) -> str:
        return f"{self.place:04}" * 20

    def step(self, message: dict[str, Any]) -> dict[str, Any]:
        time.sleep(delay(self.place, self.turn, self.median_s))
        self.turn += 1
        said = {"role": "user", "content": f"{self.turn:04}" * 3}
        return {"reward": 0.0, "episode_done": self.turn == self.turns, "next_messages": [said]}


def delay(place: int, turn: int, median_s: float) -> float:
    """Seconds, log-normal."""
    return median_s and random.Random(f"{place}/{turn}").lognormvariate(math.log(median_s), SPREAD)


class DelayedTool:
    """The same as a tool of TRL's form, which the policy calls in each of its turns."""

    def reset(self, place: int, median_s: float, **row: Any) -> None:
        self.place, self.median_s, self.called = place, median_s, 0

    def look(self) -> str:
        """Look."""
        time.sleep(delay(self.place, self.called, self.median_s))
        self.called += 1
        return f"{self.called:04}" * 3


def scored_after(response: str, delay_s: float) -> float:
    """A score of as many points as there are characters, after a delay."""
    time.sleep(delay_s)
    return float(len(response))
