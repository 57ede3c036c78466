"""The game of two that the configs play, and the moves from which it is learned first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlflow.commands.fit import read_fit
from rlflow.configs.stones import Moves, Stones, game
from rlflow.data import RandomRows
from rlflow.environments.environment import defined
from rlflow.environments.host import InProcess
from rlflow.environments.session import Session


def test_who_leaves_a_multiple_of_four_wins_against_any_move() -> None:
    for stones in (5, 6, 7, 9):
        for reply in (1, 2, 3):
            played = Session(defined(Stones), InProcess())
            played.begin([], {"stones": stones, "first": "opponent"})
            move = played.first_move()
            while not move.done:
                left = int(move.messages[0]["content"])
                taken = left % 4 if move.seat == "opponent" else min(reply, left)
                move = played.move(str(taken), move.seat, 0)
            assert move.rewards == {"opponent": 1.0, "player": -1.0}


@pytest.mark.parametrize("said", ["4", "0", "two", "", "3"])
def test_who_takes_what_cannot_be_taken_loses_and_the_other_wins_nothing(said: str) -> None:
    played = Session(defined(Stones), InProcess())
    played.begin([], {"stones": 2, "first": "player"})
    move = played.move(said, "player", 0)
    assert (move.done, move.rewards) == (True, {"player": -1.0})


def test_moves_that_are_learned_follow_the_rules_of_their_game() -> None:
    games, moves = RandomRows(game, 200), Moves(200)
    begun = set()
    for row in range(len(moves)):
        shown = moves[row]
        seen = [int(each["content"]) for each in shown["messages"] if each["content"].isdecimal()]
        left, taken = seen[::2], [*seen[1::2], int(shown["taken"].removesuffix("<|im_end|>"))]
        assert all(1 <= number <= min(3, there) for number, there in zip(taken, left, strict=True))
        assert all(later < there - number for later, there, number in zip(left[1:], left, taken, strict=False))
        assert left[0] <= games[row]["stones"]
        begun.add(left[0] == games[row]["stones"])
    assert begun == {True, False}, "of both seats"


def test_the_config_plays_itself_and_its_start(tmp_path: Path) -> None:
    config = str(Path(__file__).parents[2] / "configs" / "agent_two_players.yaml")
    fewer = ["--trainer.max_steps=2", "--data.prompts_per_step=2", "--module.init_args.group_size=2"]
    read_fit(["--config", config, "--module.init_args.actor.model=tiny", *fewer, f"--trainer.run_dir={tmp_path}"]).fit()
    for step in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()):
        assert 0 <= step["match/won"] <= 1
        assert step["rollout/turns"] >= 1
