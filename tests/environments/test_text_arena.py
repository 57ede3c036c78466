"""Games of textarena: a row is a game, and many of them in one process disturb nobody's random numbers."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest

from rlflow import Environment
from rlflow.environments.host import Host, InProcess
from rlflow.environments.session import Move, Session
from rlflow.errors import UserError


def game(host: Host | None = None, **arguments: Any) -> Session:
    pytest.importorskip("textarena")
    environment = Environment("rlflow.environments.TextArena", arguments=arguments)
    return Session(environment.definition_of({}), host or InProcess())


def first_move(one: Session, row: dict[str, Any]) -> Move:
    one.begin([], row)
    return one.first_move()


def guessed(one: Session, seed: int) -> list[str]:
    """The guessing game's answers to a search by halves, and its reward."""
    move = first_move(one, {"seed": seed})
    said, low, high = [text(move)], 1, 20
    while not move.done:
        middle = (low + high) // 2
        move = one.move(str(middle), "player", 0)
        said.append(text(move))
        low, high = (middle + 1, high) if "higher" in said[-1] else (low, middle - 1)
    return [*said, str(move.rewards)]


def text(move: Move) -> str:
    return "".join(each["content"] for each in move.messages)


def test_a_guess_by_halves_wins(host: Host) -> None:
    said = guessed(game(host, env_id="GuessTheNumber-v0"), seed=3)
    assert "guess the number between 1 and 20" in said[0]
    assert all(re.fullmatch(r"\[GAME\] The target number is (higher|lower).", each) for each in said[1:-2])
    assert said[-1] == "{'player': 1.0}"


def test_a_row_is_a_game_and_games_leave_random_numbers_alone() -> None:
    """Two games side by side say what each says alone, whatever is drawn between their moves."""
    arguments = {"env_id": "KuhnPoker-v0", "players": 2}
    alone = [played(game(**arguments), seed) for seed in (1, 2)]
    assert alone[0] != alone[1]
    random.seed(5)
    np.random.seed(5)
    numbers = random.random(), np.random.rand()
    random.seed(5)
    np.random.seed(5)
    first, second = game(**arguments), game(**arguments)
    beside = [first_move(first, {"seed": 1})], [first_move(second, {"seed": 2})]
    assert (random.random(), np.random.rand()) == numbers
    while not (beside[0][-1].done and beside[1][-1].done):
        for one, moves in ((first, beside[0]), (second, beside[1])):
            random.seed(len(moves))
            if not moves[-1].done:
                moves.append(next_move(one, moves))
    assert list(beside) == alone


def played(one: Session, seed: int) -> list[Move]:
    moves = [first_move(one, {"seed": seed})]
    while not moves[-1].done:
        moves.append(next_move(one, moves))
    return moves


def next_move(one: Session, moves: list[Move]) -> Move:
    """The first action that is offered, or the last, in turns."""
    offered = re.findall(r"'(\[\w+\])'", text(moves[-1]).rpartition("actions are")[2])
    return one.move(offered[-1] if len(moves) % 3 == 0 else offered[0], moves[-1].seat, 0)


def test_seats_take_turns_and_which_of_them_begins_follows_from_the_row() -> None:
    begins = []
    for seed in (0, 1):
        one = game(env_id="TicTacToe-v0", players=2)
        move = first_move(one, {"seed": seed})
        begins.append(move.seat)
        other = {"player": "opponent", "opponent": "player"}[move.seat]
        assert "You are Player 0" in text(move)
        second = one.move("[4]", move.seat, 0)
        assert second.seat == other
        assert "You are Player 1" in text(second)
        third = one.move("0", other, 0)
        assert "cell 0" in text(third)
        assert "You are Player 0" not in text(third), "a seat reads what is new to it"
        moves = [one.move(cell, seat, 0) for cell, seat in (("1", begins[-1]), ("2", other), ("7", begins[-1]))]
        assert moves[-1].rewards == {begins[-1]: 1.0, other: -1.0}
    assert sorted(begins) == ["opponent", "player"]
    of_rows = {first_move(game(env_id="TicTacToe-v0", players=2), {"id": at}).seat for at in range(8)}
    assert of_rows == {"player", "opponent"}


def test_a_game_that_is_not_there_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"textarena has no such game. Did you mean \"TicTacToe-v0\""):
        game(env_id="TicTacTo-v0")
    monkeypatch.setattr("rlflow.errors.find_spec", lambda module: None)
    with pytest.raises(UserError, match=r"the game 'Nim-v0' needs textarena, which is not installed; pip install"):
        Environment("rlflow.environments.TextArena", arguments={"env_id": "Nim-v0"}).definition_of({})
