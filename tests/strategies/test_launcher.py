"""Real processes that die in real ways."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from multiprocessing import get_context
from pathlib import Path

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment

from rlflow.errors import UserError
from rlflow.process import status
from rlflow.process.environment_variables import PLACE
from rlflow.process.status import StatusBoard
from rlflow.strategies import launcher
from rlflow.strategies.launcher import RankLauncher, _say, _started, _Watch, require_command

HERE = socket.gethostname()
SCRIPT = Path(__file__).with_name("ranks_script.py")
TWO_RUNS = """
from rlflow import Trainer
from rlflow.algorithms import GRPO

def length(response):
    return len(response)

for name, devices in (("alone", 1), ("together", 2)):
    trainer = Trainer(name, max_steps=1, devices=devices, accelerator="cpu")
    trainer.fit(GRPO("tiny", reward=length, group_size=2, max_response_length=4), [{"prompt": "1+1="}] * 32)
"""


@dataclass(frozen=True)
class Ending:
    code: int
    output: str
    errors: str

    def ranks_alive(self) -> list[int]:
        """Ranks whose processes are there after the launcher has ended; they have some seconds to go."""
        processes = {int(rank): int(pid) for rank, pid in re.findall(r"rank (\d) is process (\d+)", self.output)}
        assert processes.keys() == {0, 1}, self
        deadline = time.monotonic() + 5.0
        while alive := [rank for rank, pid in processes.items() if _runs(pid)]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return alive


def _runs(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return (
        stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
    )  # nobody reaps an orphan's zombie here


def ends(happening: str) -> Ending:
    """End of the script."""
    environment = {key: value for key, value in os.environ.items() if key not in ("LOCAL_RANK", "MASTER_PORT")}
    script = subprocess.Popen(
        [sys.executable, str(SCRIPT), happening],
        cwd=SCRIPT.parents[2],
        env=environment | {"PYTHONPATH": str(SCRIPT.parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        written = script.communicate(timeout=240)
    finally:
        script.kill()  # its ranks follow it
    return Ending(script.returncode, *written)


@pytest.mark.slow
def test_a_rank_that_exits_ends_one_that_hangs_with_its_code_and_one_line() -> None:
    ending = ends("rank 1 exits with 3 and rank 0 hangs")
    why = "exited with code 3 (before its first step), before the run came to its end"
    line = f"rank 1 on {HERE} {why}; ended the other ranks\n"
    assert (ending.code, ending.errors) == (3, line)
    assert ending.ranks_alive() == []


@pytest.mark.slow
def test_a_rank_that_leaves_with_code_0_has_died_and_is_named_with_what_it_did() -> None:
    ending = ends("rank 1 leaves with code 0 and rank 0 hangs")
    why = "exited with code 0 (step 2, run rewards), before the run came to its end"
    line = f"rank 1 on {HERE} {why}; ended the other ranks\n"
    assert (ending.code, ending.errors) == (1, line)
    assert ending.ranks_alive() == []


@pytest.mark.slow
def test_a_killed_rank_is_named_rather_than_the_collective_that_it_broke() -> None:
    ending = ends("rank 1 is killed and rank 0's collective fails")
    line = f"rank 1 on {HERE} was killed by SIGKILL (before its first step); ended the other ranks\n"
    assert (ending.code, ending.errors) == (1, line)
    assert ending.ranks_alive() == []


@pytest.mark.slow
def test_a_user_s_error_that_all_ranks_find_is_reported_once_by_rank_0() -> None:
    ending = ends("both ranks find a user's error")
    assert ending.code == 1  # of an uncaught exception
    assert ending.errors.count("UserError: `stage` is 7\n") == 1
    assert ending.errors.endswith("UserError: `stage` is 7\n")
    assert ending.ranks_alive() == []


def test_when_rank_0_is_killed_the_others_end() -> None:
    ending = ends("rank 0 is killed")
    assert ending.ranks_alive() == []


@pytest.mark.parametrize(
    ("end", "how", "code"),
    [
        ("sys.exit(0)", "exited with code 0", 1),
        ("sys.exit(3)", "exited with code 3", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL", 1),
    ],
)
def test_the_line_of_a_rank_says_how_its_process_ended(
    end: str, how: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    process = subprocess.Popen([sys.executable, "-c", f"import os, signal, sys; {end}"])
    process.wait(60)
    board = StatusBoard.make()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(status, "_board", board)
        patched.setattr(status, "_mine", board[0])
        board[1].write(1, "step 2, run rewards")
        assert _Watch({1: process}, 0)._reported(1) == code
    assert capfd.readouterr().err.startswith(f"rank 1 on {HERE} {how} (step 2, run rewards)")


def ends_beside(end: str, function: Callable[[], object]) -> int | None:
    """The exit code of a rank 0 that calls the function while its rank 1 ends so; both are processes."""

    def rank_0() -> None:
        status.use(StatusBoard.make())
        status.board()[1].write(1, "step 2, run rewards")
        launcher.POLL_S, launcher.GRACE_S = 0.05, 0.5
        rank_1 = subprocess.Popen([sys.executable, "-c", f"import os, signal, sys, time; {end}"])
        print(f"rank 1 is process {rank_1.pid}", flush=True)
        _Watch({1: rank_1}, 0).over(function)

    process = get_context("fork").Process(target=rank_0)  # what it needs is imported
    process.start()
    process.join(30)
    process.kill()
    return process.exitcode


def hangs() -> None:
    time.sleep(60)


def fails() -> None:
    time.sleep(0.2)
    raise RuntimeError("Connection closed by peer")


def refuses() -> None:
    raise UserError("`stage` is 7")


@pytest.mark.parametrize(
    ("end", "function", "how", "code"),
    [
        ("os._exit(0)", hangs, "exited with code 0 (step 2, run rewards), before the run came to its end", 1),
        ("sys.exit(3)", hangs, "exited with code 3 (step 2, run rewards), before the run came to its end", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", fails, "was killed by SIGKILL (step 2, run rewards)", 1),
    ],
)
def test_a_rank_that_dies_ends_rank_0_with_its_line_and_code(
    end: str, function: Callable[[], object], how: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ends_beside(end, function) == code
    assert capfd.readouterr().err == f"rank 1 on {HERE} {how}; ended the other ranks\n"


def test_an_error_of_rank_0_ends_the_other_ranks_and_is_its_caller_s(capfd: pytest.CaptureFixture[str]) -> None:
    assert ends_beside("time.sleep(60)", refuses) == 1
    written, errors = capfd.readouterr()
    assert errors.endswith("UserError: `stage` is 7\n")
    assert "ended the other ranks" not in errors
    assert not _runs(int(written.split()[-1]))


def test_a_rank_that_finishes_after_rank_0_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    board = StatusBoard.make()
    monkeypatch.setattr(status, "_board", board)
    board[1].write(1, status.ENDED)
    rank_1 = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"])
    _Watch({1: rank_1}, 0)._wait_for_all()
    assert (rank_1.returncode, capfd.readouterr().err) == (0, "")


def test_a_rank_leaves_its_error_to_rank_0_which_has_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_by_rank_0", True)
    monkeypatch.setattr(launcher, "GRACE_S", 0.3)
    began = time.monotonic()
    with pytest.raises(UserError):
        _started(refuses)
    assert time.monotonic() - began > 0.3


def test_a_terminal_that_is_gone_does_not_stop_the_ending() -> None:
    reader, terminal = os.pipe()
    os.close(reader)
    _say(terminal, "rank 1 exited with code 2; ended the other ranks")
    os.close(terminal)


@pytest.mark.slow
def test_a_rank_may_finish_after_rank_0() -> None:
    ending = ends("rank 1 ends after rank 0")
    assert (ending.code, ending.errors) == (0, "")
    assert "rank 1 is done" in ending.output


@pytest.mark.slow
def test_the_ranks_of_a_script_make_its_next_run_together() -> None:
    ending = ends("both ranks run again")
    assert (ending.code, ending.errors) == (0, "")
    first, second = re.findall(r"2 ranks run again, on port \d+", ending.output)
    assert first == second


def test_a_run_leaves_no_place_in_a_job_that_a_later_one_would_take_for_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    before = {name: os.environ.get(name) for name in PLACE}

    def joins() -> str:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        return "done"

    assert RankLauncher(LightningEnvironment(), num_processes=1, num_nodes=1).launch(joins) == "done"
    assert {name: os.environ.get(name) for name in PLACE} == before


@pytest.mark.slow
def test_a_rank_does_not_make_an_earlier_run_of_one_rank_again(tmp_path: Path) -> None:
    script = tmp_path / "my_run.py"
    script.write_text(TWO_RUNS)
    ran = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ran.returncode != 0
    assert "`trainer.devices` is 1, and a later run of this script has more" in ran.stdout + ran.stderr
    assert [path.name for path in tmp_path.glob("alone*")] == ["alone"]


def test_ranks_are_started_by_a_script_or_module_and_not_by_a_notebook_or_prompt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "my_run.py"
    script.touch()
    main = sys.modules["__main__"]
    spec = ModuleSpec("my_run", None)
    for argument, is_module, starts in (
        ("-c", False, False),
        ("-", False, False),
        (str(script), False, True),
        ("-m", True, True),
    ):
        monkeypatch.setattr(main, "__spec__", spec if is_module else None, raising=False)
        monkeypatch.setattr(sys, "argv", [argument])
        with contextlib.nullcontext() if starts else pytest.raises(UserError, match="is 2, and each"):
            require_command(2)
    monkeypatch.setattr(sys, "ps1", "In [1]: ", raising=False)  # as in IPython, whose argv[0] is a file
    with pytest.raises(UserError, match=r"`%%writefile my_run.py`, and run `python my_run.py`, or set `devices=1`"):
        require_command(2)
