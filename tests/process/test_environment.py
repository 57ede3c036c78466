"""What ranks are started with."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlflow.errors import UserError
from rlflow.process import environment
from rlflow.process.environment import ARGUMENTS, handed_arguments, require_started

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


@pytest.mark.parametrize(("run_id", "started", "refused"), [("1", "2", True), ("1", "1", False), (None, "2", False)])
def test_processes_of_torchrun_that_a_run_does_not_count_are_refused(
    run_id: str | None, started: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if run_id is not None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    monkeypatch.setenv("WORLD_SIZE", started)
    said = r"^torchrun started 2 processes, and `trainer.devices` x `trainer.num_nodes` is 1; give"
    with pytest.raises(UserError, match=said) if refused else contextlib.nullcontext():
        require_started(1)
