"""The facts about a module's arguments that ranks compare."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rlflow.module import RLModule
from rlflow.run.agreement import facts, model_files
from tests import own_folder


class Given(RLModule):
    def __init__(self, given: Any) -> None:
        super().__init__()
        self.given = given


def lines(given: Any) -> list[str]:
    return [line for line in facts(Given(given), None, "", {})[0] if line.startswith("module")]


def one(text: str) -> int:
    return len(text)


def other(text: str) -> int:
    return len(text) + 2


other.__qualname__ = one.__qualname__  # as in a notebook's cell that was run anew
PAIRS = {
    "path": (Path("a"), Path("b")),
    "set": ({"a", "b"}, {"a", "c"}),
    "list in a list": ([[1]], [[2]]),
    "list in a dict": ({"a": [1]}, {"a": [2]}),
    "function in a list": ([one], [other]),
    "object in a list in a dict": ({"a": [Given(1)]}, {"a": [Given(2)]}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_arguments_that_differ_at_any_depth_are_found(name: str) -> None:
    here, there = PAIRS[name]
    assert lines(here) == lines(here)
    assert lines(here) != lines(there)


def test_a_set_is_compared_in_one_order() -> None:
    assert lines({"b", "a"})[1:] == ["module.given[]: 'a'", "module.given[]: 'b'"]


def test_only_what_is_given_is_compared() -> None:
    assert [line.partition(":")[0] for line in lines(None)] == ["module", "module.given"]


def test_the_code_of_a_user_s_modules_is_compared_and_of_what_they_import(tmp_path: Path) -> None:
    code = {"helper_of_reward": "POINTS = 1", "reward_with_helper": "from helper_of_reward import POINTS"}
    found = []
    for changed in ("", "helper_of_reward", "reward_with_helper"):
        for name, text in code.items():
            (tmp_path / f"{name}.py").write_text(text + " " * (name == changed))
        with own_folder.forgotten(tmp_path), pytest.MonkeyPatch.context() as patched:
            patched.syspath_prepend(tmp_path)
            import_module("reward_with_helper")
            found.append(facts(Given(None), None, "", {})[1])
    of = [[digests[f"code of {name}"] for name in code] for digests in found]
    assert [one != other for one, other in zip(of[0], of[1], strict=True)] == [True, False]
    assert [one != other for one, other in zip(of[0], of[2], strict=True)] == [False, True]


def test_a_byte_of_a_model_is_compared(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes(bytes(1000))
    before = model_files(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(bytes(999) + b"1")
    after = model_files(tmp_path)
    assert before["config.json"] == after["config.json"]
    assert before["model.safetensors"] != after["model.safetensors"]
    here, there = (facts(Given(None), None, "", {"actor": files})[1] for files in (before, after))
    assert here["file model.safetensors of `actor`"] != there["file model.safetensors of `actor`"]
