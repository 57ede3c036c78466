"""No setting and no metric of rlflow's own is hidden as a secret."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

from rlflow.loggers.secrets import arguments_without_secrets, without_secrets

PROJECT = Path(__file__).parents[2]
CONFIGS = sorted((PROJECT / "configs").rglob("*.yaml"))
IN_FUNCTIONS = {"token"}  # a number in rlflow's own functions, and no setting
# Shown if they are numbers, as they are.
COUNTED = {"picture_tokens", "tokens", "total_tokens", "trunk_tokens", "useful_tokens"}


def settings() -> set[str]:
    """Arguments of all constructors and functions, and fields."""
    names = set[str]()
    for folder in ("rlflow", "algorithms"):
        for path in (PROJECT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef):
                    names |= {each.arg for each in (*node.args.args, *node.args.kwonlyargs)}
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    names.add(node.target.id)
    return names - IN_FUNCTIONS


def metrics() -> set[str]:
    return set(re.findall(r"`([a-z_]+/[\w/{}@]+)`", (PROJECT / "docs/metrics.md").read_text()))


def test_the_checked_names_include_settings_and_metrics_of_tokens() -> None:
    assert {"max_prompt_length", "max_tokens", "key"} <= settings()
    assert "rollout/tokens" in metrics()
    assert len(settings()) > 1000
    assert len(metrics()) > 90


@pytest.mark.parametrize("value", [3, 0.5, "8", "a"])
def test_no_setting_is_hidden(value: object) -> None:
    names = sorted(settings() if value != "a" else settings() - COUNTED)
    assert without_secrets(dict.fromkeys(names, value)) == dict.fromkeys(names, value)
    for name in names:
        assert arguments_without_secrets([f"--a.{name}", str(value)]) == [f"--a.{name}", str(value)]


def test_no_metric_is_hidden() -> None:
    for name in metrics():
        assert without_secrets({name: 0.5}) == {name: 0.5}


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_nothing_of_a_config_is_hidden(path: Path) -> None:
    config = yaml.safe_load(path.read_text())
    assert without_secrets(config) == config
