"""Agents of libraries, in the configs: a call of a tool continues the tokens that were sampled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.episodes import played, running, says

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
PROGRAM = str(ROOT / "tests" / "harness" / "as_program.py")
ROWS = [{"question": "2+3", "answer": "5"}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'

pytestmark = pytest.mark.slow


def python_of(name: str) -> str:
    python = ROOT / "build" / "door" / name / "bin" / "python"
    assert python.exists(), "make door-envs"
    return str(python)


@pytest.mark.parametrize("agent", ["mcp", "curl", "openai_agents"])
def test_an_agent_calls_its_tool_and_its_episode_is_one_row(agent: str) -> None:
    run: str | list[str] = f"rlflow.configs.{agent}_agent.solve"
    if agent == "curl":
        run = ["bash", str(CONFIGS / "curl_agent.sh")]
    if agent == "openai_agents":
        run = [python_of("agents"), "-P", PROGRAM, str(CONFIGS / "openai_agents_agent.py")]
    made = played(run, says(CALL, "5"), ROWS)
    assert [len(row[4]) for row in made.rows] == [3]  # a call, its result, the answer
    assert made.rows[0][5] == [0.0, 1.0]
    assert "<|im_start|>tool\n5<|im_end|>" in made.text(0)
    assert made.trained() == [f"{CALL}<|im_end|>5<|im_end|>"]
    assert made.times.episodes.refused == 0


def test_each_step_of_smolagents_is_a_row_since_it_writes_earlier_calls_as_text() -> None:
    run = [python_of("agents"), "-P", PROGRAM, str(CONFIGS / "smolagents_agent.py")]
    last = '<tool_call>{"name": "final_answer", "arguments": {"answer": "5"}}</tool_call>'
    with running(longest_prompt=6000) as runner:
        made = played(run, says(CALL, last), ROWS, runner=runner, ignore=("tool_choice",))
    assert sorted(made.trained()) == sorted([f"{CALL}<|im_end|>", f"{last}<|im_end|>"])
    assert {row[5][-1] for row in made.rows} == {1.0}
    assert made.times.episodes.refused == 0


@pytest.mark.parametrize("library", ["openenv", "verifiers"])
def test_the_reward_is_what_the_library_gives_what_the_policy_said(library: str) -> None:
    run = [python_of(library), str(CONFIGS / f"{library}_agent.py")]
    for said, reward in (("5", 1.0), ("6", 0.0)):
        assert [row[5] for row in played(run, says(said), ROWS, timeout_s=300).rows] == [[reward]]
