"""`GameSession`, an environment of several seats: it says who speaks next, and what each of them reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlflow.environments.environment_session import EnvironmentSession, as_mapping, naming_row, written
from rlflow.environments.host import HostError
from rlflow.environments.messages import Message, message
from rlflow.errors import UserError


@dataclass(frozen=True)
class Move:
    """What a game says.

    Attributes:
        seat: Who speaks next; empty where it is over.
        messages: What that one reads: of what was said since it spoke last, what it may know.
        rewards: By seat.
        done: Whether it is over.
    """

    seat: str = ""
    messages: list[Message] = field(default_factory=list)
    rewards: Mapping[str, float] = field(default_factory=dict)
    done: bool = False


class GameSession(EnvironmentSession):
    """Answers the turns of all seats.

    Its environment has `seats`. `initial_observation` and `step` name the seat that speaks next as `next_seat`, and
    what it reads as `next_messages`. `step` gives `reward`, of the seat that spoke, or `rewards` by seat; `get_reward`
    gives them by seat.
    """

    @naming_row
    def begin(self, prompt: Sequence[Message], row: Mapping[str, Any]) -> tuple[list[Message], Move]:
        """The messages with which each seat begins, and who speaks first.

        Args:
            prompt: Those of the dataset's row.
            row: All of its columns.

        Raises:
            HostError: The environment failed.
            UserError: It does not take the row, or gave no messages.
        """
        messages = [written(each) for each in self._made(prompt, row)]
        where = f"`{self._definition.path}.initial_observation`"
        return messages, self._moved(self._host.call("initial_observation"), "", where)

    @naming_row
    def move(self, text: str, seat: str, turn: int) -> Move:
        """What the game says to what a seat said in its turn of this number.

        Raises:
            HostError: The environment failed, or gave what is no message or no finite reward.
            UserError: It gave no seat.
        """
        result = self._host.call("step", message=message("assistant", text))
        return self._moved(result, seat, f"`{self._definition.path}.step` at turn {turn} of {seat}")

    @naming_row
    def rewards(self) -> Mapping[str, float]:
        """Of the whole game by seat, from `get_reward`; none where the environment has no such method."""
        if not self._definition.rewards:
            return {}
        return self._by_seat(self._host.call("get_reward"), f"`{self._definition.path}.get_reward`")

    def _moved(self, result: Any, spoke: str, where: str) -> Move:
        names = ("next_seat", "next_messages", "reward", "rewards", "episode_done")
        found = as_mapping(result, names)
        if found is None:
            raise HostError(f"{where} gave {result!r:.60}; give `next_seat` and `next_messages`, or `episode_done`")
        rewards = dict(self._by_seat(found.get("rewards") or {}, where))
        if spoke and "reward" in found:
            rewards[spoke] = rewards.get(spoke, 0.0) + self._number(found["reward"], where)
        if found.get("episode_done", False):
            return Move(rewards=rewards, done=True)
        seat = found.get("next_seat")
        if seat not in self._definition.seats:
            raise UserError(
                f"{where} gave the seat {seat!r:.60} as `next_seat`, and `seats` are"
                f" {', '.join(self._definition.seats)}; name one of them"
            )
        return Move(seat, [written(each) for each in self._messages(found.get("next_messages"), where)], rewards)

    def _by_seat(self, given: Any, where: str) -> Mapping[str, float]:
        if not isinstance(given, Mapping) or not set(given) <= set(self._definition.seats):
            raise UserError(
                f"{where} gave the rewards {given!r:.60}; give a number for each of {', '.join(self._definition.seats)}"
            )
        return {seat: self._number(value, where) for seat, value in given.items()}
