"""An environment for whole runs; ranks of their own import it by its path."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Mapping
from typing import Any


class Counting:
    """Answers with the number of odd characters, the reward of the turn; over after as many turns as it says."""

    def reset(self, question: str) -> None:
        self.left = 1 + int(question.partition("+")[0]) % 3

    def initial_observation(self) -> str:
        return f"{self.left} turns"

    async def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        odd = sum(ord(character) % 2 for character in message["content"])
        self.left -= 1
        said = [{"role": "user", "content": f"odd {odd}"}]
        return {"reward": odd, "episode_done": self.left == 0, "next_messages": said}


class OfFirstRank(Counting):
    """Is called by one rank alone."""

    def reset(self, question: str) -> None:
        assert os.environ["RANK"] == "0"
        super().reset(question)


class Broken(Counting):
    """Fails for some rows, at their beginning or at a turn."""

    def reset(self, question: str) -> None:
        super().reset(question)
        if int(question.partition("+")[0]) % 4 == 0:
            raise RuntimeError("broken")

    async def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if self.left == 2:
            raise RuntimeError("broken")
        return await super().step(message)


class Meeting(Counting):
    """Begins when as many conversations are beginning; how many did together is `most`."""

    guests = 12
    here = most = 0
    door: asyncio.Semaphore

    async def initial_observation(self) -> str:  # type: ignore[override]
        Meeting.here += 1
        Meeting.most = max(Meeting.most, Meeting.here)
        for _ in range(3000):
            if Meeting.most >= self.guests:
                break
            await asyncio.sleep(0.01)
        Meeting.here -= 1
        async with Meeting.door:  # which has one loop
            await asyncio.sleep(0)
        assert Meeting.most >= self.guests, "nobody else came"
        return super().initial_observation()


class Couples(Meeting):
    guests = 2


class Slow(Counting):
    """Takes its time."""

    SECONDS = 0.03

    async def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        time.sleep(self.SECONDS)
        return await super().step(message)


def five(response: str, row: dict[str, Any]) -> float:
    return 5.0


class Duel:
    """Two seats in turns, for one to four moves; each reads how many odd characters the other wrote, the last wins."""

    seats = ("player", "opponent")
    pause = 0.0
    fails_at = -1

    def reset(self, question: str) -> str:
        number = int(question.partition("+")[0])
        self.left, self.turn = 1 + number % 4, number // 4 % 2
        return f" You are of {len(self.seats)}."

    def initial_observation(self) -> dict[str, Any]:
        return {"next_seat": self.seats[self.turn], "next_messages": f"{self.left} moves"}

    def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        time.sleep(random.random() * self.pause)
        if self.left == self.fails_at:
            raise RuntimeError("broken")
        odd = sum(ord(character) % 2 for character in message["content"])
        mover, self.turn = self.seats[self.turn], 1 - self.turn
        other = self.seats[self.turn]
        self.left -= 1
        if self.left == 0:
            return {"reward": odd / 4, "rewards": {mover: 1.0, other: -1.0}, "episode_done": True}
        return {"reward": odd / 4, "next_seat": other, "next_messages": f"odd {odd}"}

    def get_reward(self) -> dict[str, float]:
        return {"opponent": 0.5}


class SlowDuel(Duel):
    pause = 0.02


class BrokenDuel(Duel):
    fails_at = 2


class WordyDuel(Duel):
    """Says each thing a hundred times."""

    def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        moved = super().step(message)
        return {**moved, "next_messages": moved.get("next_messages", "") * 100}


class RankedDuel(Duel):
    """In each group, the seats that read most get 8 more; it uses up its arguments."""

    @classmethod
    def get_group_rewards(cls, conversations: list[dict[str, Any]]) -> list[float]:
        assert {each["seat"] for each in conversations} <= {*cls.seats}
        counts = [len(each["messages"]) for each in conversations]
        for each in conversations:
            each["messages"].clear()
            each["rewards"].clear()
        return [8.0 * (count == max(counts)) for count in counts]


class PausedDuel(Duel):
    SECONDS = 0.03

    def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        time.sleep(self.SECONDS)
        return super().step(message)


class Favoured(Duel):
    """One seat is always right, the other never."""

    def get_reward(self) -> dict[str, float]:
        return {"player": 100.0, "opponent": -100.0}


class Drawing(Counting):
    """Draws what it adds to its answers."""

    async def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        answer = await super().step(message)
        answer["next_messages"][0]["content"] += f" {random.randrange(1000)}"
        return answer


class Stateful(Drawing):
    """The same, and says where it is."""

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = state["left"]


class Unloadable(Stateful):
    """Is not continued."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise RuntimeError("broken")


class Unserializable(Stateful):
    """Keeps what JSON has not."""

    def state_dict(self) -> dict[str, Any]:
        return {"left": {self.left}}


class Compared(Stateful):
    """In each group, the last one gets 100 more."""

    def get_group_rewards(self, conversations: list[dict[str, Any]]) -> list[float]:
        return [100.0 * (number == len(conversations) - 1) for number in range(len(conversations))]
