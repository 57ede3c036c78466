"""The table of defaults in docs/algorithms.md says what the classes and their configs have."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlflow import algorithms
from rlflow.algorithms import policy_gradient
from rlflow.algorithms.policy_gradient import Clipped
from rlflow.functional import KL, Bounds, Importance
from rlflow.models.model_arguments import model_parameters

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(\w+)` \| `([\w.]+)` \| `([^`]+)` \| (?:`([^`]+)` )?\| ", re.MULTILINE)
NAMES = sorted(algorithms.__all__)
CLASSES = {name: getattr(algorithms, name) for name in NAMES}
BASES = {
    name: getattr(policy_gradient, name) for name in ("Clipped", "PolicyGradient", "Ratio", "Scored", "TurnCredit")
}

# What to load and how to train it, which no paper decides: names of settings, or their last parts.
NOT_OF_THE_PAPER = {
    "critic",
    "environment",
    "gradient_checkpointing",
    "judge",
    "discriminator",
    "lora",
    "model",
    "moe",
    "optimizer",
    "proposer",
    "reference",
    "reward",
    "reward_model",
    "reward_model_coef",
    "solver",
    "stop_token_ids",
    "teacher",
    "trainable",
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
    """The value as the table shows it."""
    return f"{value.level}, {value.mode}, {value.high:g}" if isinstance(value, Importance) else value


def config_of(name: str) -> dict[str, Any]:
    """The settings that the algorithm's config gives."""
    (section,) = re.findall(rf"^### {name}\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL)
    (config,) = set(re.findall(r"`(configs/\w+\.yaml)`", section))
    given: dict[str, Any] = yaml.safe_load((ROOT / config).read_text(encoding="utf-8"))["module"]["init_args"]
    return {name: value for name, value in flat(given).items() if name.split(".")[-1] not in NOT_OF_THE_PAPER}


def flat(given: dict[str, Any]) -> dict[str, Any]:
    """The settings of models and of parts by dotted name."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        in_part = isinstance(value, dict) and ("model" in value or name in ("clip", "kl"))
        found |= {f"{name}.{inner}": of for inner, of in value.items()} if in_part else {name: value}
    return found


def defaults(algorithm: type) -> dict[str, Any]:
    """Defaults as in the table, those of models and of parts by dotted name."""
    found: dict[str, Any] = {}
    for field in (field for field in dataclasses.fields(algorithm) if field.init):
        if isinstance(field.default, KL | Bounds):
            found |= {f"{field.name}.{name}": value for name, value in vars(field.default).items()}
        else:
            found[field.name] = shown(field.default)
    for role, kind in model_parameters(algorithm).items():
        for name, parameter in inspect.signature(kind).parameters.items():
            found[f"{role}.{name}"] = parameter.default
    return found


def of_bases(algorithm: type) -> dict[str, tuple[Any, Any]]:
    """The rows of the classes that the algorithm shares settings with."""
    return {
        setting: row
        for name, base in BASES.items()
        if issubclass(algorithm, base)
        for setting, row in TABLE[name].items()
    }


@pytest.mark.parametrize("name", [*(CLASSES | BASES)])
def test_the_defaults_in_the_table_are_those_of_the_class(name: str) -> None:
    of_class = defaults((CLASSES | BASES)[name])
    assert {setting: default for setting, (default, _) in TABLE.get(name, {}).items()} == {
        setting: of_class[setting] for setting in TABLE.get(name, {})
    }


@pytest.mark.parametrize("name", [*(CLASSES | BASES)])
def test_no_setting_that_the_class_gives_a_default_is_missing(name: str) -> None:
    algorithm = (CLASSES | BASES)[name]
    own = vars(algorithm).get("__annotations__", {}).keys() - model_parameters(algorithm).keys()
    of_all = defaults(Clipped)
    given = {setting: value for setting, value in defaults(algorithm).items() if setting.split(".")[0] in own}
    if name not in BASES:  # of its parts, what is no other than there
        given = {name: value for name, value in given.items() if "." not in name or value != of_all.get(name)}
    assert given.keys() - NOT_OF_THE_PAPER <= TABLE.get(name, {}).keys()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "PolicyGradient"])
def test_the_config_has_what_the_table_says(name: str) -> None:
    algorithm, given = getattr(algorithms, name), config_of(name)
    of_class = defaults(algorithm)
    of_all = of_bases(algorithm)
    for setting, (default, config) in TABLE.get(name, {}).items():
        assert given.get(setting, default) == (default if config is ... else config), setting
    for setting in given.keys() - TABLE.get(name, {}).keys():
        assert given[setting] in (of_class[setting], *of_all.get(setting, ())), setting
