"""Environments as users write them. They import the standard library alone."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Any


class WordGame:
    """A class in the form of TRL's documentation, whose public methods are tools."""

    def __init__(self) -> None:
        self.secret = ""
        self.tries = 0

    def reset(self, **row: Any) -> str:
        self.secret = row["word"]
        self.tries = 0
        return f" It has {len(self.secret)} letters."

    def guess(self, word: str) -> str:
        """Guess the word.

        Args:
            word: The word that you think it is.
        """
        if not word:
            raise ValueError("an empty word")
        self.tries += 1
        return "right" if word == self.secret else "wrong"

    def get_reward(self) -> float:
        return 1.0 / max(1, self.tries)


class LaterGame(WordGame):
    """The same, asynchronous."""

    async def guess(self, word: str) -> str:  # type: ignore[override]
        """Guess the word.

        Args:
            word: The word that you think it is.
        """
        return super().guess(word)


@dataclass
class StepResult:
    reward: float
    episode_done: bool
    next_messages: list[dict[str, Any]]


class CountDown:
    """An environment in the form of Tinker's `MessageEnv`: turns without tools."""

    def reset(self, start: int) -> None:
        self.left = start

    async def initial_observation(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": "text", "text": f"count down from {self.left}"}]}]

    async def step(self, message: dict[str, Any]) -> StepResult:
        right = message["content"].strip() == str(self.left)
        self.left -= 1
        return StepResult(float(right), self.left < 0 or not right, [{"role": "user", "content": "next"}])


class Sized(CountDown):
    """Counts from a number that it is made with."""

    def __init__(self, start: int, by: int = 1) -> None:
        self.start = start

    def reset(self) -> None:
        super().reset(self.start)


class Games:
    class Inner(CountDown): ...


class Dealt(CountDown):
    """Takes one of the cards that it is made with, and one of the row's."""

    def __init__(self, deck: list[int]) -> None:
        self.deck = deck

    def reset(self, cards: list[int]) -> None:
        super().reset(self.deck.pop() + cards.pop())


def add(a: float, b: float) -> float:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


class Unwritten:
    def reset(self) -> None: ...


class Untold:
    def guess(self, word: str) -> str:
        return word


class Untyped:
    def guess(self, word) -> str:  # type: ignore[no-untyped-def]
        """Guess."""
        return str(word)


class Unrewarding(CountDown):
    async def step(self, message: dict[str, Any]) -> StepResult:
        return StepResult(float("nan") if message["content"] == "nan" else 10**400, False, [])


class Endless(WordGame):
    def reset(self, **row: Any) -> str:
        while True:
            pass


def read_file(path: str, method: str = "r") -> str:
    """Read a file.

    Args:
        path: Path of the file.
        method: Mode in which it is opened.
    """
    return f"{path} {method}"


def whatever(kind: str) -> Any:
    """Give what JSON has not, or raise.

    Args:
        kind: Of what.
    """
    if kind == "nothing":
        raise ValueError("nothing at all")
    return {"pair": (1, 2), "day": date(2026, 1, 2), "set": {1}}[kind]


def half(text: str) -> str:
    """Give half a character.

    Args:
        text: Any.
    """
    return "\ud800" + text


class Sleepy(WordGame):
    def guess(self, word: str) -> str:
        """Guess the word, late.

        Args:
            word: The word.
        """
        import time

        time.sleep(60)
        return super().guess(word)


class Stuck(CountDown):
    """Never answers who counts from 13."""

    async def step(self, message: dict[str, Any]) -> StepResult:
        import time

        if self.left == 13:
            time.sleep(60)
        return StepResult(1.0, True, [])


class Tuples(CountDown):
    async def step(self, message: dict[str, Any]) -> Any:
        return 1.0, True, []


class Ranked(CountDown):
    """In each group, the shortest conversation gets 1."""

    @staticmethod
    def get_group_rewards(conversations: list[dict[str, Any]]) -> list[float]:
        lengths = [len(each["messages"]) for each in conversations]
        return [float(length == min(lengths)) for length in lengths]


class Miscounted(CountDown):
    @classmethod
    async def get_group_rewards(cls, conversations: list[dict[str, Any]]) -> list[float]:
        return [0.0]


class Stones:
    """Two players take one to three stones in turns; who takes the last wins."""

    seats = ("player", "opponent")

    def reset(self, stones: int, first: str = "player") -> str:
        self.left, self.turn = stones, self.seats.index(first)
        return f" There are {stones} stones."

    def initial_observation(self) -> dict[str, Any]:
        return {"next_seat": self.seats[self.turn], "next_messages": "take"}

    async def step(self, message: dict[str, Any]) -> dict[str, Any]:
        taken, mover = message["content"].strip(), self.seats[self.turn]
        other = self.seats[1 - self.turn]
        if taken not in ("1", "2", "3") or int(taken) > self.left:
            return {"rewards": {mover: -1.0, other: 0.5}, "episode_done": True}
        self.left, self.turn = self.left - int(taken), 1 - self.turn
        if self.left == 0:
            return {"rewards": {mover: 1.0, other: -1.0}, "episode_done": True}
        return {"reward": 0.25, "next_seat": other, "next_messages": f"{taken} taken, {self.left} left"}


class Seatless(Stones):
    """Names a seat that is none."""

    def initial_observation(self) -> dict[str, Any]:
        return {"next_seat": "dealer"}


class Misjudged(Stones):
    """Rewards a seat that is none."""

    async def step(self, message: dict[str, Any]) -> dict[str, Any]:
        return {"rewards": {"dealer": 1.0}, "episode_done": True}


class Lamp:
    """An environment of Gymnasium's form: say `on`."""

    def __init__(self, tries: int = 2) -> None:
        self.left = tries

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return f"dark {seed} {(options or {})['room']}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return "dark", float(action == "on"), action == "on", self.left == 0, {}


class Sky:
    """An environment of SkyRL-Gym's form."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        self.answer, self.bonus = (extras or {})["answer"], env_config["bonus"]

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        return [*prompt, {"role": "user", "content": "Think."}], {}

    def step(self, action: str) -> dict[str, Any]:
        right = action == self.answer
        said = [] if right else [{"role": "user", "content": "no"}]
        return {"observations": said, "reward": right + self.bonus, "done": right, "metadata": {}}


class Forgetful(Sky):
    """Writes another prompt."""

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        return [{"role": "user", "content": "Anew."}], {}


class Appending(Sky):
    """Adds to the very prompt that it is given."""

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        prompt.append({"role": "user", "content": "Think."})
        return prompt, {}


class Dated:
    def guess(self, day: date | None = None) -> str:
        """Guess.

        Args:
            day: Of the week.
        """
        return str(day)


class Unbound:
    def guess(self, *words: str) -> str:
        """Guess.

        Args:
            words: Any.
        """
        return str(words)


class Undefined:
    def guess(self, word: Word) -> str:  # type: ignore[name-defined]  # noqa: F821
        """Guess.

        Args:
            word: Of a type that nobody wrote.
        """
        return str(word)


class Pictures(CountDown):
    def __init__(self, part: Any = None) -> None:
        self.part = part or {"type": "image", "image": "cat.png"}

    async def initial_observation(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": "text", "text": "what is this?"}, self.part]}]


class Letters:
    """An environment in the form of TRL's documentation: it keeps its reward, and a call after the end raises."""

    def __init__(self) -> None:
        self.reward = 0.0
        self.done = False

    def reset(self, **kwargs: Any) -> str | None:
        self.secret, self.left = kwargs["word"], 3
        self.reward = 0.0
        self.done = False
        return f"\nYou have {self.left} guesses."

    def guess(self, guess: str) -> str:
        """
        Guess the word.

        Args:
            guess: A word of as many letters, formatted as '[abcde]'

        Returns:
            Of each letter, G where it stands in its place, Y where it stands elsewhere, and X where it does not.
        """
        if self.done:
            raise ValueError("Game over.")
        word = guess.strip("[]")
        self.left -= 1
        self.done = word == self.secret or self.left == 0
        self.reward = 1.0 if word == self.secret else 0.0
        return self._marks(word)

    def _marks(self, word: str) -> str:
        pairs = zip(word, self.secret, strict=False)
        return "".join("G" if a == b else "Y" if a in self.secret else "X" for a, b in pairs)


class LaterLetters(Letters):
    """The same, asynchronous."""

    async def reset(self, **kwargs: Any) -> str | None:  # type: ignore[override]
        return super().reset(**kwargs)

    async def guess(self, guess: str) -> str:  # type: ignore[override]
        """
        Guess the word.

        Args:
            guess: A word of as many letters, formatted as '[abcde]'

        Returns:
            Of each letter, G where it stands in its place, Y where it stands elsewhere, and X where it does not.
        """
        return super().guess(guess)
