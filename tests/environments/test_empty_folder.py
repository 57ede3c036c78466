"""The examples of the pages on environments, and one in the form of TRL's documentation, train from a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlflow.environments.bridge import message
from rlflow.environments.environment import defined
from rlflow.environments.host import InProcess
from rlflow.environments.session import Session
from tests.environments import games
from tests.environments.test_session import call, spoken
from tests.own_folder import command
from tests.ranks import RankPool
from tests.test_docs import block_with, blocks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the page, with other classes in addition to its own."""
    folder = tmp_path_factory.mktemp("agent")
    shown = [block_with("first_environment.md", "class WordGame:"), block_with("agents.md", "class CountDown:")]
    (folder / "my_env.py").write_text("\n\n".join(shown))
    (folder / "trl_env.py").write_text(Path(games.__file__).read_text())
    (rows,) = blocks("first_environment.md", "json")
    (folder / "words.jsonl").write_text(rows)
    (config,) = blocks("first_environment.md", "yaml")
    (folder / "agent.yaml").write_text(config)
    return folder


def fit(folder: Path, config: str, ranks: RankPool) -> list[dict[str, Any]]:
    """The metrics of the steps of `rlflow fit`."""
    ranks.run(command, folder, "fit", "--config", config, timeout_s=300)
    run = folder / yaml.safe_load((folder / config).read_text())["trainer"]["run_dir"]
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_page_s_folder_trains_and_so_do_environments_of_trl_s_form(folder: Path, ranks2: RankPool) -> None:
    """One run holds both: the page's class, and others of TRL's form by a column, one of them asynchronous."""
    config = yaml.safe_load((folder / "agent.yaml").read_text())
    given = config["module"]["init_args"]["environment"]["init_args"]
    assert given["environment"] == "my_env.WordGame"
    given["environment"] = {
        "page": "my_env.WordGame",
        "trl": "trl_env.Letters",
        "later": "trl_env.LaterLetters",
    }
    config["trainer"] |= {"max_steps": 1, "devices": 2}
    (folder / "several.yaml").write_text(yaml.safe_dump(config))
    rows = [json.loads(line) for line in (folder / "words.jsonl").read_text().splitlines()]
    named = [{**row, "environment": name} for row, name in zip(rows, ["page", "trl", "later", "page"], strict=True)]
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in named))
    (step,) = [line for line in fit(folder, "several.yaml", ranks2) if "actor/loss" in line]
    assert 1 <= step["rollout/turns"] <= 3
    assert step["reward/environment"] == step["reward/outcome"]
    assert step["rollout/ended_failed"] == 0


def test_the_page_s_environments_play_as_it_says(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    words = Session(defined("my_env.WordGame"), InProcess())
    (first,) = words.begin([message("user", "Guess my word.")], {"word": "sky"})
    assert first["content"] == "Guess my word. It has 3 letters."
    said = [words.answer(spoken(call("guess", word=word)), turn).messages for turn, word in enumerate(("sea", "sky"))]
    assert [each["content"] for (each,) in said] == ["wrong", "right"]
    assert words.reward() == 0.5
    counting = Session(defined("my_env.CountDown"), InProcess())
    assert counting.begin([], {"start": 1})[-1]["content"] == "count down from 1"
    replies = [counting.answer(spoken(text), turn) for turn, text in enumerate(("1", "0"))]
    assert [(reply.reward, reply.done) for reply in replies] == [(1.0, False), (1.0, True)]
