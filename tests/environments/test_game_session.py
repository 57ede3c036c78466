"""Environments of several seats: the order of seats, their messages, and their rewards."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rlflow.environments.bridge import message
from rlflow.environments.environment import defined
from rlflow.environments.host import Host, HostError, InProcess
from rlflow.environments.session import Session
from rlflow.errors import UserError

PROMPT = [message("user", "Win.")]


def test_a_game_says_who_speaks_and_what_it_reads(host: Host) -> None:
    game = Session(defined("games.Stones"), host)
    began = game.begin(PROMPT, {"stones": 5, "first": "opponent"})
    first = game.first_move()
    assert began == [message("user", "Win. There are 5 stones.")]
    assert (first.seat, first.messages, first.rewards) == ("opponent", [message("user", "take")], {})
    second = game.move("2", "opponent", 0)
    assert (second.seat, second.messages) == ("player", [message("user", "2 taken, 3 left")])
    assert second.rewards == {"opponent": 0.25}
    last = game.move("3", "player", 0)
    assert (last.done, last.rewards) == (True, {"player": 1.0, "opponent": -1.0})
    assert game.rewards() == {}


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("games.Seatless", "initial_observation` gave the seat 'dealer' as `next_seat`, and `seats` are player, opp"),
        ("games.Misjudged", "step` at turn 2 of player gave the rewards {'dealer': 1.0}; give a number for each of"),
    ],
)
def test_a_seat_that_is_none_is_refused_in_one_line(path: str, line: str) -> None:
    with pytest.raises(HostError, match=line) as refused:
        two_moves(Session(defined(path), InProcess()))
    assert "\n" not in str(refused.value)


def two_moves(game: Session) -> None:
    game.begin(PROMPT, {"stones": 5})
    game.first_move()
    game.move("2", "player", 2)


class Twice:
    seats: Sequence[str] = ("player", "player")

    def initial_observation(self) -> None: ...

    def step(self) -> None: ...


class Single(Twice):
    seats = "player"


class Numbered(Twice):
    seats = (0, 1)  # type: ignore[assignment]


class Mute:
    seats = ("player", "opponent")

    def guess(self, word: str) -> str:
        """Guess.

        Args:
            word: A word.
        """
        return word


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        (Twice, r"`.*Twice.seats` is \('player', 'player'\); give names, each once, such as"),
        (Mute, "`.*Mute` has `seats` and no `initial_observation` and `step`"),
        (Single, "`.*Single.seats` is 'player'; give names, each once, such as"),
        (Numbered, r"`.*Numbered.seats` is \(0, 1\); give names, each once, such as"),
    ],
)
def test_seats_that_cannot_be_are_refused_in_one_line(environment: type, line: str) -> None:
    with pytest.raises(UserError, match=line):
        defined(environment)
