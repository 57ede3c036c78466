"""The faults of values by their type, and the advice in errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest

from rlflow import CausalLM, Reward
from rlflow.callbacks import Callback
from rlflow.config.checking import described, mistakes_of
from rlflow.config.merging import written_whole
from rlflow.functional import Clip
from rlflow.loggers import Logger
from rlflow.models.optimizer import Optimizer
from rlflow.rollout import RolloutEngine, Share


class Colour(Enum):
    RED = 1
    BLUE = 2


@pytest.mark.parametrize(
    ("hint", "said"),
    [
        (int, "an integer"),
        (bool, "true or false"),
        (str | None, "a text or null"),
        (Literal["a", "b"] | None, "one of 'a', 'b' or null"),
        (Colour, "one of 'RED', 'BLUE'"),
        (Path, "a path"),
        (str | Callable[..., Any], "a text or the path of a function"),
        (tuple[float, float], "a list of 2, each a number"),
        (Sequence[int], "a list, each an integer"),
        (list[Logger], "a list, each a Logger, by its name or as `class_path` and `init_args`"),
        (dict[str, float] | None, "a mapping, each value a number or null"),
        (dict[str, Any], "a mapping"),
        (Callback | None, "a Callback, by its name or as `class_path` and `init_args` or null"),
        (Optimizer | None, "a mapping of arguments or null"),
    ],
    ids=str,
)
def test_a_type_is_described_in_words(hint: Any, said: str) -> None:
    assert described(hint) == said


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (float, 3),
        (float, "1e-5"),
        (int | None, None),
        (Colour, "RED"),
        (Path, "folder"),
        (Literal[1, 2], 2),
        (tuple[float, float], [0.9, 1]),
        (tuple[int, ...], [1, 2, 3]),
        (dict[str, list[int]], {"a": [1], "b": []}),
        (Clip, {"low": 0.1}),
        (list[Logger], [{"class_path": "csv"}]),
        (dict[str, Share | RolloutEngine], {"judge": {"share": "actor"}, "critic": {"class_path": "vllm"}}),
    ],
    ids=str,
)
def test_a_value_of_its_type_has_no_mistake(hint: Any, value: Any) -> None:
    assert list(mistakes_of(value, hint)) == []


@pytest.mark.parametrize(
    ("hint", "value", "keys"),
    [
        (int, True, ()),
        (int, "010", ()),
        (int, 3.0, ()),
        (float, True, ()),
        (str, 3, ()),
        (Colour, "GREEN", ()),
        (Literal[1, 2], True, ()),
        (Literal["1"], 1, ()),
        (tuple[float, float], [0.9], ()),
        (tuple[float, float], [0.9, "x"], ()),
        (list[int], [1, "x"], ("1",)),
        (list[int], 1, ()),
        (dict[str, int], {"a": 1, "b": None}, ("b",)),
        (dict[str, int], {3: 1}, ("3",)),
        (Clip, {"low": "x"}, ("low",)),
        (Logger, 3, ()),
        (str | Callable[..., Any], ["a.b"], ()),
    ],
    ids=str,
)
def test_a_value_of_another_type_is_a_mistake_at_its_key(hint: Any, value: Any, keys: tuple[str, ...]) -> None:
    (mistake,) = mistakes_of(value, hint)
    assert (mistake.keys, mistake.of_type) == (keys, True)


REWARDS = Reward | Callable[..., Any] | str | list[Reward | str] | dict[str, Reward | str]
EXACT = "rlflow.rewards.ExactMatch"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("my_rewards.exact", "my_rewards.exact"),  # a function's path is for the reward to find
        ("exact_match", {"class_path": EXACT, "init_args": {}}),
        ([EXACT, "my_rewards.exact"], [{"class_path": EXACT, "init_args": {}}, "my_rewards.exact"]),
        ({"exact": "ExactMatch"}, {"exact": {"class_path": EXACT, "init_args": {}}}),
        ({"class_path": "ExactMatch"}, {"class_path": EXACT, "init_args": {}}),
    ],
)
def test_a_type_may_be_a_class_a_text_or_a_list_or_mapping_of_either(value: Any, expected: Any) -> None:
    found = written_whole(value, REWARDS)
    assert found == expected
    assert list(mistakes_of(found, REWARDS)) == []


@pytest.mark.parametrize(
    ("value", "keys", "found"),
    [
        ([{"class_path": "ExactMatsh"}], ("0", "class_path"), "is 'ExactMatsh', and no class is known by that name."),
        (
            {"a": {"class_path": "exact_match", "init_args": {"anwser": "a"}}},
            ("a", "init_args", "anwser"),
            "not a known",
        ),
    ],
)
def test_a_mistake_in_a_list_or_mapping_of_classes_is_found_at_its_key(value: Any, keys: Any, found: str) -> None:
    (mistake,) = mistakes_of(written_whole(value, REWARDS), REWARDS)
    assert mistake.keys == keys
    assert found in mistake.found


def test_a_text_for_a_class_that_needs_one_text_is_that_text() -> None:
    for hint in (CausalLM, CausalLM | str, CausalLM | None):
        whole = {"class_path": "rlflow.models.causal_lm.CausalLM", "init_args": {"model": "Qwen/Qwen2.5-0.5B"}}
        assert written_whole("Qwen/Qwen2.5-0.5B", hint) == whole
