"""`rlflow doctor` on machines with real faults: packages hidden by a hook of Python's import, ports taken, folders."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from packaging.requirements import Requirement

from rlflow.cli import main
from rlflow.doctor import trials
from rlflow.doctor.checks import DISTRIBUTION, Finding, installed, many_machines, module_of, run_process

# Python runs it at the start of every process whose path it is on.
HIDES = """
import sys

class Hides:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hides())
"""


def examined(folder: Path, *arguments: str, hidden: tuple[str, ...] = (), **environment: str) -> tuple[int, str]:
    """The exit code of `rlflow doctor` in a folder, and what it printed."""
    (folder / "sitecustomize.py").write_text(HIDES.format(hidden=hidden))
    ran = subprocess.run(
        [sys.executable, "-m", "rlflow.cli", "doctor", *arguments],
        cwd=folder,
        env=cleaned() | {"PYTHONPATH": str(folder)} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "Traceback" not in ran.stdout + ran.stderr
    return ran.returncode, ran.stdout + ran.stderr


def cleaned() -> Mapping[str, str]:
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
    return {name: value for name, value in os.environ.items() if name not in ours} | {"OMP_NUM_THREADS": "1"}


def line(printed: str, start: str) -> str:
    """The first line of the report about something; `ok       torch ...` or `broken   torch ...`."""
    return next(each.strip() for each in printed.splitlines() if each[11:].startswith(start))


def test_what_is_broken_is_named_with_how_to_fix_it_and_the_code_is_1(tmp_path: Path) -> None:
    taken = socket.create_server(("", 0))
    (tmp_path / "file").write_text("")
    code, printed = examined(
        tmp_path,
        "--quick",
        hidden=("torch",),  # by which most others go too, and the doctor does not
        MASTER_ADDR="localhost",
        MASTER_PORT=str(taken.getsockname()[1]),
        HF_HOME=str(tmp_path / "file" / "cache"),
        TMPDIR=str(tmp_path),
        GLOO_SOCKET_IFNAME="eth77",
    )
    taken.close()
    assert code == 1
    assert line(printed, "torch 2").startswith("broken   torch 2")
    assert "cannot be imported: ModuleNotFoundError: No module named 'torch'" in line(printed, "torch 2")
    assert line(printed, "httpx ").startswith("ok       httpx")
    assert line(printed, "MASTER_PORT").startswith("broken")
    assert "Address already in use" in line(printed, "MASTER_PORT")
    assert line(printed, "models of the hub").startswith("broken")
    assert "set HF_HOME to a folder that you may write" in line(printed, "models of the hub")
    assert "no eth77 here; give one of" in line(printed, "GLOO_SOCKET_IFNAME")
    assert line(printed, "MASTER_ADDR").startswith("ok")
    assert "tried" not in printed
    assert "need fixing" in printed.splitlines()[-1]


def test_what_many_nodes_need_is_needed_where_a_run_has_many(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ.keys() - cleaned().keys():
        monkeypatch.delenv(name)
    one, two = (
        next(each for each in many_machines(gpu=False, nodes=nodes) if each.what.startswith("MASTER_ADDR"))
        for nodes in (1, 2)
    )
    assert not one.fails
    assert "(not needed here)" in str(one)
    assert two.fails
    assert str(two).startswith("missing  MASTER_ADDR")
    assert "set MASTER_ADDR to the first machine's name" in str(two)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    (alone,) = (each for each in many_machines(gpu=False, nodes=2) if each.what.startswith("MASTER_ADDR"))
    assert "which others cannot reach" in str(alone)


@pytest.mark.parametrize(
    ("chosen", "used"),
    [
        ("", {"mlx5_1", "mlx5_10"}),
        ("mlx5_1:1", {"mlx5_1", "mlx5_10"}),
        ("=mlx5_1:1", {"mlx5_1"}),
        ("^mlx5_10", {"mlx5_1"}),
        ("^=mlx5_1", {"mlx5_10"}),
    ],
)
def test_adapters_that_nccl_leaves_out_are_not_needed(
    chosen: str, used: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mlx5_1", "mlx5_10"):
        (tmp_path / name / "ports" / "1").mkdir(parents=True)
        (tmp_path / name / "ports" / "1" / "state").write_text("1: DOWN\n")
    monkeypatch.setattr("rlflow.doctor.checks.INFINIBAND", tmp_path)
    monkeypatch.setenv("NCCL_IB_HCA", chosen)
    found = [each for each in many_machines(gpu=True, nodes=2) if each.what.startswith("InfiniBand mlx5")]
    assert {each.what.split()[1].rstrip(":") for each in found if each.fails} == used


@pytest.mark.parametrize(
    ("name", "given", "fails"),
    [("GLOO", "l", True), ("GLOO", "^lo", True), ("NCCL", "l", False), ("NCCL", "=l", True), ("NCCL", "=lo", False)],
)
def test_an_interface_is_named_as_gloo_and_nccl_read_it(
    name: str, given: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"{name}_SOCKET_IFNAME", given)
    (found,) = (each for each in many_machines(gpu=False, nodes=1) if each.what.startswith(f"{name}_SOCKET"))
    assert found.fails == fails


@pytest.mark.slow
def test_two_ranks_meet_by_gloo_and_a_network_that_is_not_there_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    well = trials._meet("gloo", tmp_path / "well", 60)
    assert well.state == "ok", well
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    ill = trials._meet("gloo", tmp_path / "ill", 60)
    assert ill.state == "broken", ill
    assert "eth77" in str(ill)


def test_a_trial_that_fails_is_broken_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDES.format(hidden=("torch",)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for found in (
        trials._meet("gloo", tmp_path, 60),
        trials._train(False, "here", 1, "single", "transformers", tmp_path, 60),
    ):
        assert found.state == "broken"
        assert "No module named 'torch'" in found.what


def test_a_trial_that_does_not_end_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    sleeps = "import subprocess, time; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); time.sleep(60)"
    ran = run_process(tmp_path, ["-c", sleeps], seconds=6)
    assert ran.code is None
    assert "did not end within 6 s" in ran.why
    until = time.monotonic() + 5
    while (runs := psutil.pid_exists(int(ran.output)) and is_running(int(ran.output))) and time.monotonic() < until:
        time.sleep(0.1)
    assert not runs


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_module_of_every_installed_package_is_known() -> None:
    named = {Requirement(text).name for text in requires(DISTRIBUTION) or ()}
    there = {module_of(name).partition(".")[0] for name in named - {DISTRIBUTION} if installed(name) is not None}
    assert len(there) > 20
    assert [module for module in there if find_spec(module) is None] == []


def test_what_is_missing_and_not_needed_does_not_fail() -> None:
    assert not Finding("wandb", "missing", "pip install wandb", needed=False).fails
    assert Finding("torch", "missing", "pip install torch").fails
    assert Finding("wandb", "broken", "pip install wandb", needed=False).fails


def test_a_setting_that_cannot_be_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--num_nodes", "0"])
    assert ended.value.code == 2
    assert "`--num_nodes` is 0; give 1 or more" in capsys.readouterr().err


@pytest.mark.slow
def test_a_step_and_a_sync_of_every_engine_here_work(tmp_path: Path) -> None:
    code, printed = examined(tmp_path, "--keep", "kept")
    assert code == 0, printed
    for engine in ("transformers engine, one process", "transformers engine, DeepSpeed", "vLLM engine"):
        assert line(printed, f"steps and syncs: {engine}").startswith("ok"), printed
    assert "all that runs need works" in printed.splitlines()[-1]


@pytest.mark.slow
def test_a_step_that_cannot_be_is_broken_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDES.format(hidden=("accelerate",)))
    environment = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(tmp_path)
    try:
        found = trials._train(False, "here", 1, "single", "transformers", tmp_path, 120)
    finally:
        os.environ.pop("PYTHONPATH") if environment is None else os.environ.update(PYTHONPATH=environment)
    assert found.state == "broken"
    assert "accelerate" in str(found)
