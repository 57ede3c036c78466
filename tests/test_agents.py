"""The shipped configs of agents: their environments, the conversations that they learn from, and that each trains."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.learning.agents import Move
from rlflow import Environment
from rlflow.commands.fit import read_fit
from rlflow.configs.calculator import INSTRUCTIONS, FailingCalculator, InstructedSums, Sums, unsure
from rlflow.configs.guessing import MOST, GuessingGame, careless, secret
from rlflow.data import RandomRows, ScriptedConversations
from rlflow.data.sources import Source
from tests.slow import slow_but

ROOT = Path(__file__).parent.parent
IN_ONE_PROCESS = [
    *("--trainer.devices=1", "--trainer.max_steps=2", "--trainer.val_check_interval=2", "--strategy=single"),
    "--rollout=rlflow.rollout.TransformersEngine",
    *("--module.init_args.actor.model=tiny", "--data.prompts_per_step=2", "--module.init_args.max_response_length=120"),
]


NAMES = {path.stem for path in (ROOT / "configs").glob("agent_*.yaml")} - {
    "agent_two_players",  # without validation
    *("agent_openai_agents", "agent_smolagents", "agent_smolagents_sft"),  # of libraries that the locks leave out
}


@pytest.mark.parametrize("name", slow_but(("agent_sft", "agent_failing_tool"), sorted(NAMES)))
def test_a_config_trains(name: str, tmp_path: Path) -> None:
    few = "--data.{}.init_args.rows.init_args.size={}" if name.endswith("sft") else "--data.{}.init_args.size={}"
    sizes = [few.format(part, 4) for part in ("train", "validation")]
    config = str(ROOT / "configs" / f"{name}.yaml")

    read_fit(["--config", config, *IN_ONE_PROCESS, *sizes, f"--trainer.run_dir={tmp_path}"]).fit()

    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["step"] == 2
    assert steps[-1]["actor/grad_norm"] > 0 or not name.endswith("sft"), "from a model without a right answer"
    assert steps[-1]["val/turns"] >= 1


def conversations(source: Source, environment: Environment, script: object) -> list[list[dict[str, str]]]:
    played = ScriptedConversations(source, environment, script)  # type: ignore[arg-type]
    return [played[row]["messages"] for row in range(len(played))]


def test_the_sums_of_the_two_splits_differ_and_have_their_answers() -> None:
    train, validation = (Sums(200, split=split) for split in ("train", "validation"))  # type: ignore[arg-type]
    asked = [{each[row]["question"] for row in range(200)} for each in (train, validation)]
    assert not asked[0] & asked[1]
    assert all(each["answer"] == str(each["a"] + each["b"]) for each in (train[row] for row in range(200)))


def test_half_of_the_prompts_of_sums_begin_with_instructions() -> None:
    prompts = [row["asked"] for row in map(InstructedSums(400).__getitem__, range(400))]
    assert [each[-1]["content"] for each in prompts] == [Sums(400)[row]["question"] for row in range(400)]
    instructions = [each[0]["content"] for each in prompts if len(each) == 2]
    assert {*instructions} == {*INSTRUCTIONS}
    assert len(instructions) / 400 == pytest.approx(0.5, abs=0.1)


def test_one_call_in_five_fails_as_the_row_and_the_call_decide() -> None:
    def outcomes(row: str) -> list[bool]:
        calculator = FailingCalculator()
        calculator.reset(row)
        worked = []
        for _ in range(20):
            try:
                worked.append(calculator.add(2, 3) == 5)
            except TimeoutError:
                worked.append(False)
        return worked

    found = [outcomes(f"train/{number}") for number in range(100)]
    # Of 2,000 draws the share has a standard deviation of 0.009.
    assert fmean(map(fmean, found)) == pytest.approx(0.8, abs=0.03)
    random.seed(1)
    assert [outcomes(f"train/{number}") for number in range(100)] == found


def test_the_script_calls_every_other_time_and_repeats_what_it_receives() -> None:
    environment = Environment("rlflow.configs.calculator.FailingCalculator", max_turns=4)
    source = Sums(400)
    held = conversations(source, environment, unsure)
    calls = [each for each in held if "tool_call" in each[1]["content"]]
    assert len(calls) / 400 == pytest.approx(0.5, abs=0.1)
    heard = [row for row, each in enumerate(held) if each[-2]["role"] == "tool" and each[-2]["content"].isdecimal()]
    assert all(held[row][-1]["content"] == source[row]["answer"] for row in heard)
    assert fmean(held[row][-1]["content"] == source[row]["answer"] for row in set(range(400)) - {*heard}) < 0.3


def test_the_game_says_what_is_left_and_each_turn_costs_a_tenth() -> None:
    game = GuessingGame()
    game.reset(6)
    replies = [game.step({"content": said}) for said in ("4", "8", "6")]
    assert [each["next_messages"] for each in replies] == [
        [{"role": "user", "content": "5-9"}],
        [{"role": "user", "content": "5-7"}],
        [],
    ]
    assert [each["reward"] for each in replies] == [0.0, 0.0, pytest.approx(0.8)]
    assert [each["episode_done"] for each in replies] == [False, False, True]


def test_the_careless_script_takes_more_turns_than_who_draws_what_is_left() -> None:
    environment = Environment("rlflow.configs.guessing.GuessingGame", max_turns=40)
    held = conversations(RandomRows(secret, 400), environment, careless)
    assert all(1 <= int(said["content"]) <= MOST for each in held for said in each[1::2])
    # Who always draws from what is left takes 3.29 turns, the mean depth of a random search tree of 9; halving 2.78.
    assert 3.6 < fmean(len(each) / 2 for each in held) < 4.2


@pytest.mark.parametrize(
    ("move", "passes"),
    [
        (Move("val/turns", -1.0), True),
        (Move("val/turns", -3.0), False),
        (Move("val/accuracy", 0.4), True),
        (Move("val/accuracy", 0.6), False),
        (Move("val/accuracy", 0.4, to=0.9), False),
    ],
)
def test_a_number_must_move_as_far_as_asked(move: Move, passes: bool) -> None:
    run = [{"step": 0, "val/turns": 6.0, "val/accuracy": 0.3}, {"step": 1}, {"step": 2, "val/turns": 4.5}]
    run[-1]["val/accuracy"] = 0.8
    assert move.passes(run) is passes  # type: ignore[arg-type]
