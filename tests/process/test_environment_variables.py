"""The environment variables and arguments with which ranks are started."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rlflow.errors import UserError
from rlflow.process import environment_variables
from rlflow.process.environment_variables import ARGUMENTS, handed_arguments, keep_kernels_here, require_started

TAKES = """import sys
from rlflow.process.environment_variables import take_arguments

take_arguments()
print(sys.argv[1:])
"""


def test_a_process_of_a_command_takes_the_arguments_that_are_not_on_its_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment_variables, "_takes_arguments", True)
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


@pytest.mark.parametrize("name", [None, "NODE_RANK", "SLURM_JOB_ID"])
def test_several_machines_without_a_launcher_are_refused(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {} if name is None else {name: "1"})
    said = r"^`trainer.num_nodes` is 2, and nothing says which machine this is; start the run by torchrun or srun"
    with pytest.raises(UserError, match=said) if name is None else contextlib.nullcontext():
        require_started(4, 2)


def test_kernels_are_stored_on_the_machine_unless_a_variable_says_where(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for user, stored in ((os.getuid(), True), (os.getuid() + 1, False)):  # the second folder is the first user's
        folder = tmp_path / f"rlflow-kernels-{user}"
        monkeypatch.setattr(os, "getuid", lambda user=user: user)
        monkeypatch.setattr(os, "environ", {"TRITON_CACHE_DIR": "mine"})
        keep_kernels_here()
        others = {"VLLM_CACHE_ROOT": f"{folder}/vllm", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        assert os.environ == {"TRITON_CACHE_DIR": "mine"} | (others if stored else {})
        assert folder.stat().st_mode & 0o777 == 0o700
