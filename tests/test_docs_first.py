"""The pages on a first reward, environment and agent: their folders train, and show what the pages show."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlflow.errors import UserError, one_line
from tests.own_folder import command
from tests.test_docs import DOCS, blocks

Run = Callable[..., str]


def lines(page: str, language: str = "text") -> list[str]:
    return [line for block in blocks(page, language) for line in block.splitlines()]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Calls a command line of a page in the folder; returns what it prints, or the error without its place."""

    def called(line: str) -> str:
        _, name, *arguments = line.split("#")[0].split()
        try:
            command(tmp_path, name, *arguments)
        except UserError as error:
            return f"rlflow: error: {one_line(error)}"
        return capsys.readouterr().out

    return called


def write(folder: Path, page: str, **files: str) -> None:
    """Write files of a page, each the first block of its language."""
    for name, language in files.items():
        file = {"python": f"{name}.py", "yaml": f"{name}.yaml", "json": f"{name}.jsonl", "text": f"{name}.txt"}[
            language
        ]
        (folder / file).write_text(blocks(page, language)[0], encoding="utf-8")


def change(file: Path, before: str, after: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert before in text
    file.write_text(text.replace(before, after), encoding="utf-8")


def test_the_folder_of_the_first_reward_trains_and_shows_its_parts(tmp_path: Path, run: Run) -> None:
    page = "first_reward.md"
    write(tmp_path, page, my_rewards="python", sums="json", my="yaml")
    by_hand, fit, samples = lines(page, "bash")
    said = by_hand.split("# ")[1]
    code = re.findall("'(.*)' #", by_hand)[0]
    called = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert called.stdout == f"{said}\n"
    run(fit)
    shown = run(samples)
    assert re.match(r"step 5  row \d  sample 0  reward -0\.\d+ \(brevity -0\.\d+, right 0\)  ended: ", shown)
    assert re.match(r"step 5  row \d  sample 0  reward -0\.\d+ \(brevity -0\.\d+, right 0\)  ended: ", lines(page)[0])
    logged = [json.loads(line) for line in (tmp_path / "runs/reward/metrics.jsonl").read_text().splitlines()]
    assert len(logged) == 5
    assert all({"reward/mean", "reward/right", "reward/brevity"} <= step.keys() for step in logged)


def test_the_errors_of_the_first_reward_are_those_of_the_page(tmp_path: Path, run: Run) -> None:
    page = "first_reward.md"
    no_column, no_name, no_module, returns_none, gold = [line for line in lines(page) if line.startswith("rlflow")]
    write(tmp_path, page, my_rewards="python", sums="json", my="yaml")
    good = (tmp_path / "my_rewards.py").read_text()
    fit = lines(page, "bash")[1]
    change(tmp_path / "my_rewards.py", "answer: str", "solution: str")
    assert run(fit) == no_column
    (tmp_path / "my_rewards.py").write_text(good)
    change(tmp_path / "my_rewards.py", "return {", "pass  # {")
    assert run(fit).startswith(returns_none.removesuffix("..."))
    (tmp_path / "my_rewards.py").unlink()
    assert run(fit) == no_module
    (tmp_path / "my_rewards.py").write_text(good)
    change(tmp_path / "my.yaml", "my_rewards.graded", "my_rewards.grade")
    assert run(fit) == no_name
    (tmp_path / "my_rewards.py").write_text(good + blocks(page, "python")[-1])
    called, settings = blocks(page, "yaml")[1].splitlines()[1:]
    change(tmp_path / "my.yaml", "reward: my_rewards.grade", f"reward:\n    {called}\n    {settings}")
    assert run(fit) == gold


def test_the_folder_of_the_first_environment_plays_and_trains(tmp_path: Path, run: Run) -> None:
    page = "first_environment.md"
    write(tmp_path, page, my_env="python", words="json", agent="yaml", turns="text")
    play, fit, samples = lines(page, "bash")
    assert run(play).endswith(blocks(page, "text")[1])
    run(fit)
    assert "reward 0  1 turn  ended: " in run(samples)
    logged = [json.loads(line) for line in (tmp_path / "runs/agent/metrics.jsonl").read_text().splitlines()]
    text = (DOCS / page).read_text(encoding="utf-8")
    for name in ("rollout/turns", "rollout/tool_calls", "reward/environment"):
        assert f"`{name}`" in text
        assert all(name in step for step in logged)


def test_the_errors_of_the_first_environment_are_those_of_the_page(tmp_path: Path, run: Run) -> None:
    page = "first_environment.md"
    no_type, no_name, raises = [line for line in lines(page) if line.startswith("rlflow")]
    write(tmp_path, page, my_env="python", words="json", agent="yaml", turns="text")
    good = (tmp_path / "my_env.py").read_text()
    play = lines(page, "bash")[0]
    change(tmp_path / "my_env.py", "word: str", "word")
    assert run(play) == no_type
    (tmp_path / "my_env.py").write_text(good)
    change(tmp_path / "my_env.py", 'row["word"]', 'row["letters"]')
    assert run(play).startswith(raises.removesuffix("..."))
    (tmp_path / "my_env.py").write_text(good)
    change(tmp_path / "agent.yaml", "my_env.WordGame", "my_env.WordGam")
    assert run(play) == no_name


@pytest.mark.slow
def test_the_folder_of_an_agent_that_owns_its_loop_trains_and_shows_its_rows(tmp_path: Path, run: Run) -> None:
    page = "harness.md"
    write(tmp_path, page, my_agent="python", sums="json", agent="yaml")
    fit, samples = lines(page, "bash")[:2]
    run(fit)
    assert re.search(r"reward [01] .*ended: done, the agent ended it", run(samples))
    logged = [json.loads(line) for line in (tmp_path / "runs/agent/metrics.jsonl").read_text().splitlines()]
    assert [step["rollout/episodes"] for step in logged] == [16.0] * 3
    change(tmp_path / "my_agent.py", 'row["answer"]', 'row["solution"]')
    assert run(fit).startswith("rlflow: error: the harness `my_agent.solve` failed: `my_agent.solve` raised KeyError")
