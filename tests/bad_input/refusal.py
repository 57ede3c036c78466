"""Runs a command with a mistake, and reads its line."""

from __future__ import annotations

from typing import Any, Protocol

import pytest

from rlflow.cli import main


class Refused(Protocol):
    """The one line of `rlflow fit` about a config, before a model is loaded."""

    def __call__(self, changes: dict[str, Any]) -> str: ...


Case = tuple[str, dict[str, Any], str]  # the mistake, the changes of the config, a part of the line


def refusal(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that the command ends in."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    errors = capfd.readouterr().err
    assert ended.value.code == 2, errors
    (line,) = (line for line in errors.split("\n") if line and "\r" not in line)  # transformers' bar has \r
    assert line.startswith("rlflow: error: "), errors
    return line.removeprefix("rlflow: error: ")


def ids(cases: list[Case]) -> list[str]:
    """The mistakes."""
    return [mistake for mistake, *_ in cases]
