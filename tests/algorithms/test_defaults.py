"""The table of defaults in docs/algorithms.md says what the classes and their configs have."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlflow import algorithms
from rlflow.algorithms import PolicyGradient
from rlflow.functional import Importance

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(\w+)` \| `(\w+)` \| `([^`]+)` \| (?:`([^`]+)` )?\| ", re.MULTILINE)
NAMES = sorted(algorithms.__all__)

# What to load and how to train it, which no paper decides.
NOT_OF_THE_PAPER = {
    "critic_lora",
    "critic_optimizer",
    "critic_path",
    "gradient_checkpointing",
    "lora",
    "model",
    "moe",
    "optimizer",
    "reference_path",
    "reward",
    "reward_model_coef",
    "reward_model_path",
    "teacher_path",
}


def table() -> dict[str, dict[str, tuple[Any, Any]]]:
    """Default and the config's value, or `...` where it sets none, by algorithm and setting."""
    found: dict[str, dict[str, tuple[Any, Any]]] = {}
    for algorithm, setting, default, config in ROW.findall(PAGE):
        assert setting not in found.setdefault(algorithm, {}), f"{algorithm}.{setting} has two rows"
        found[algorithm][setting] = yaml.safe_load(default), yaml.safe_load(config) if config else ...
    return found


TABLE = table()


def shown(value: object) -> object:
    """As it stands in the table."""
    return f"{value.level}, {value.mode}, {value.high:g}" if isinstance(value, Importance) else value


def config_of(name: str) -> dict[str, Any]:
    """The settings that the algorithm's config gives."""
    (section,) = re.findall(rf"^### {name}\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL)
    (config,) = set(re.findall(r"`(configs/\w+\.yaml)`", section))
    given: dict[str, Any] = yaml.safe_load((ROOT / config).read_text(encoding="utf-8"))["module"]["init_args"]
    return {setting: value for setting, value in given.items() if setting not in NOT_OF_THE_PAPER}


@pytest.mark.parametrize("name", NAMES)
def test_the_defaults_are_the_class_s(name: str) -> None:
    fields = {field.name: field for field in dataclasses.fields(getattr(algorithms, name))}
    assert {setting: default for setting, (default, _) in TABLE.get(name, {}).items()} == {
        setting: shown(fields[setting].default) for setting in TABLE.get(name, {})
    }


@pytest.mark.parametrize("name", NAMES)
def test_no_setting_that_the_class_gives_a_default_is_missing(name: str) -> None:
    own = vars(getattr(algorithms, name))["__annotations__"]
    fields = {field.name for field in dataclasses.fields(getattr(algorithms, name))}
    assert (fields & own.keys()) - NOT_OF_THE_PAPER <= TABLE.get(name, {}).keys()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "PolicyGradient"])
def test_the_config_has_what_the_table_says(name: str) -> None:
    algorithm, given = getattr(algorithms, name), config_of(name)
    defaults = {field.name: shown(field.default) for field in dataclasses.fields(algorithm)}
    of_all = TABLE["PolicyGradient"] if issubclass(algorithm, PolicyGradient) else {}
    for setting, (default, config) in TABLE.get(name, {}).items():
        assert given.get(setting, default) == (default if config is ... else config), setting
    for setting in given.keys() - TABLE.get(name, {}).keys():
        assert given[setting] in (defaults[setting], *of_all.get(setting, ())), setting
