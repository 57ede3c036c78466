"""The facts about a module's arguments that ranks compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlflow.module import RLModule
from rlflow.run.agreement import facts


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
def test_arguments_that_differ_within_are_told_apart(name: str) -> None:
    here, there = PAIRS[name]
    assert lines(here) == lines(here)
    assert lines(here) != lines(there)


def test_a_set_is_compared_in_one_order() -> None:
    assert lines({"b", "a"})[1:] == ["module.given[]: 'a'", "module.given[]: 'b'"]


def test_only_what_is_given_is_compared() -> None:
    assert [line.partition(":")[0] for line in lines(None)] == ["module", "module.given"]
