"""What ranks are started with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlflow.process import environment
from rlflow.process.environment import ARGUMENTS, handed_arguments

TAKES = "import sys; from rlflow.process import environment; environment.take_arguments(); print(sys.argv[1:])"


def test_a_process_of_a_command_takes_the_arguments_that_are_not_on_its_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment, "_takes_arguments", True)
    monkeypatch.setattr(sys, "argv", ["rlflow", "fit", "--password", "opensesame"])
    with handed_arguments():
        command = [sys.executable, "-c", TAKES, *sys.argv[1:]]
        taken = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert command[-1] == "fit"
    assert taken.stdout == "['fit', '--password', 'opensesame']\n"
    assert sys.argv[-1] == "opensesame"
    assert ARGUMENTS not in os.environ


def test_a_script_of_a_user_who_reads_its_arguments_itself_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--password", "opensesame"])
    with handed_arguments():
        assert sys.argv[-1] == "opensesame"
