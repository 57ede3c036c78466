"""An environment or a form of its turns that cannot work ends in one line before a model is loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rlflow.models import tiny
from tests.bad_input.refusal import Case, Refused, ids
from tests.own_folder import REMOVED

MODULE = """
class Game:
    def guess(self, word: str) -> str:
        \"\"\"Guess the word.

        Args:
            word: Any.
        \"\"\"
        return word


class Untold(Game):
    def ask(self, word: str) -> str:
        return word


class Untyped(Game):
    def ask(self, word: bytes) -> str:
        \"\"\"Ask.

        Args:
            word: Any.
        \"\"\"


class Hidden(Game):
    def reset(self, secret: str) -> None:
        pass


class Told:
    def initial_observation(self, secret: str) -> str:
        return secret

    def step(self, message):
        return {"episode_done": True}


def guess(word: str) -> str:
    \"\"\"Guess the word.

    Args:
        word: Any.
    \"\"\"
"""
ENVIRONMENT = "module.init_args.environment"


def answered_by(name: str, **more: Any) -> dict[str, Any]:
    """The changes of a config that give it an environment."""
    environment = {"class_path": "rlflow.Environment", "init_args": {"environment": f"my_games.{name}", **more}}
    return {ENVIRONMENT: environment, "module.init_args.reward": REMOVED, "data.max_prompt_length": 2000}


CASES: list[Case] = [
    (
        "a tool without a docstring",
        answered_by("Untold"),
        "tool `Untold.ask` has no schema (Cannot generate JSON schema for ask because it has no docstring!); write a",
    ),
    (
        "a tool of a type that has no schema",
        answered_by("Untyped"),
        "tool `Untyped.ask` has no schema (`word` is of type bytes, which JSON does not have); write a docstring,",
    ),
    (
        "two tools of one name",
        answered_by("Game", tools=["my_games.guess"]),
        "two tools have the name `guess`, `Game.guess` and `my_games.guess`; rename one of them",
    ),
    (
        "a column that `reset` takes and no row has",
        answered_by("Hidden"),
        "rows.jsonl, line 1: `my_games.Hidden.reset` takes `secret`, which the row does not have (it has ",
    ),
    (
        "a first observation that takes columns",
        answered_by("Told"),
        "`my_games.Told.initial_observation` takes `secret`, and it is called without arguments; take columns of the",
    ),
    (
        "a template that changes earlier turns",
        answered_by("Game") | {"module.init_args.actor.model": "forgetful"},
        "the model's chat template changes earlier turns when a message comes: from token ",
    ),
    (
        "a renderer that does not exist",
        answered_by("Game") | {"data.renderer": "qwen9"},
        "`data.renderer` is 'qwen9': No renderer config registered for name='qwen9'. Known: [",
    ),
    (
        "a renderer of another family",
        answered_by("Game") | {"data.renderer": {"name": "qwen3", "enable_thinking": False}},
        "the renderer `qwen3` does not fit the model's tokenizer (",
    ),
    (
        "a form of calls that does not exist",
        answered_by("Game") | {"data.tool_calls": "herms"},
        "`data.tool_calls` is 'herms'; give one of hermes, qwen3_coder, llama3, mistral, harmony, or null for what",
    ),
    (
        "a form of calls beside a renderer",
        answered_by("Game") | {"data.tool_calls": "hermes", "data.renderer": "qwen3"},
        "`data.renderer` and `data.tool_calls` are set, and a renderer parses calls of tools itself; leave",
    ),
    (
        "a renderer without conversations",
        {"data.renderer": "qwen3"},
        "`data.renderer` is set, and GRPO has no environment, whose turns it is for; leave it out",
    ),
]


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template writes thoughts in the last turn alone."""
    folder = tiny.write_tiny_model(tmp_path_factory.mktemp("models") / "forgetful")
    template = folder / "chat_template.jinja"
    said = "{{ message.content if loop.last else message.content.split('</think>')[-1] }}"
    written = template.read_text()
    assert "{{ message.content }}" in written
    template.write_text(written.replace("{{ message.content }}", said))
    return folder


@pytest.mark.parametrize(("mistake", "changes", "complaint"), CASES, ids=ids(CASES))
def test_a_wrong_environment_is_refused_in_one_line_before_a_model_is_loaded(
    refused: Refused,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    forgetful: Path,
    mistake: str,
    changes: dict[str, Any],
    complaint: str,
) -> None:
    (folder / "my_games.py").write_text(MODULE)
    (folder / "forgetful").symlink_to(forgetful)
    monkeypatch.delitem(sys.modules, "my_games", raising=False)
    assert complaint in refused(changes)
