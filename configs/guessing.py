"""A number to guess: the rows, the game, and whose conversations the model is taught.

`agent_guess_sft.yaml` and `agent_guess.yaml` name what is here.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

MOST = 9


def secret(draws: random.Random) -> dict[str, Any]:
    """A row: a number from 1 to 9."""
    return {"question": f"1-{MOST}", "secret": 1 + draws.randrange(MOST)}


class GuessingGame:
    """Says what is left of the numbers, such as `1-4`; the reward is 1 at once, and a tenth less by each turn."""

    def reset(self, secret: int) -> None:
        self.secret, self.turns = secret, 0
        self.low, self.high = 1, MOST

    def initial_observation(self) -> list[dict[str, Any]]:
        return []

    def step(self, message: dict[str, Any]) -> dict[str, Any]:
        self.turns += 1
        said = message["content"]
        if not said.isdecimal():
            return {"reward": 0.0, "episode_done": True, "next_messages": []}
        guess = int(said)
        if guess == self.secret:
            return {"reward": max(0.0, 1.1 - self.turns / 10), "episode_done": True, "next_messages": []}
        if guess < self.secret:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        left = {"role": "user", "content": f"{self.low}-{self.high}"}
        return {"reward": 0.0, "episode_done": False, "next_messages": [left]}


def careless(messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any], draws: random.Random) -> str:
    """A script that draws any number that is still possible, and one time in three any number at all."""
    low, high = map(int, messages[-1]["content"].split("-"))
    return str(draws.randint(1, MOST) if draws.random() < 1 / 3 else draws.randint(low, high))
