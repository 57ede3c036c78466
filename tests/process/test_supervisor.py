"""Real processes, and their supervisor."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlflow.errors import UserError
from rlflow.process.status import AT_FIRST, ENDED, StatusBoard, refusing_exits

HERE = socket.gethostname()
SCRIPT = Path(__file__).with_name("supervised_script.py")
HAPPENINGS = [
    "comes to its end",
    "leaves by libc",
    "is killed",
    "is killed after a save",
    "exits with 2 after a word of its own",
    "is held by C at its end",
    "is held by C at the end of a failure",
    "is stopped",
    "waits for a rank that does something else",
    "leaves a program",
    "takes long to leave",
    "handles signals",
    "waits",
]


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Every script, all running side by side."""
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK")}
    started = {
        happening: subprocess.Popen(
            [sys.executable, str(SCRIPT), happening],
            env=environment | {"PYTHONPATH": str(SCRIPT.parents[2])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for happening in HAPPENINGS
    }
    yield started
    for script in started.values():
        script.kill()
        script.communicate()


def ending(script: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code, and what was said of errors."""
    _, errors = script.communicate(timeout=300)
    return script.returncode, errors


def waiting(script: subprocess.Popen[str]) -> int:
    """The process that is waited for, once it waits itself."""
    assert script.stdout is not None
    found = re.fullmatch(r"process (\d+)\n", script.stdout.readline())
    assert found
    assert script.stdout.readline() == "waits\n"
    return int(found[1])


def test_a_run_that_comes_to_its_end_exits_with_code_0_and_prints_nothing(
    scripts: dict[str, subprocess.Popen[str]],
) -> None:
    assert ending(scripts["comes to its end"]) == (0, "")


def test_a_parent_that_was_started_with_sigchld_ignored_waits_no_longer() -> None:
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), "comes to its end"],
        env=os.environ | {"PYTHONPATH": str(SCRIPT.parents[2])},
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    ) as script:
        try:
            assert script.wait(60) == 0
        finally:
            script.kill()


def test_an_exit_in_c_before_the_end_is_reported_with_rank_and_task(
    scripts: dict[str, subprocess.Popen[str]],
) -> None:
    line = f"rlflow: error: rank 3 on {HERE} exited with code 0 (step 7, run rewards), before the run came to its end\n"
    assert ending(scripts["leaves by libc"]) == (1, line)


def test_a_killed_run_is_named_and_the_signal_passed_on(scripts: dict[str, subprocess.Popen[str]]) -> None:
    line = f"rlflow: error: rank 3 on {HERE} was killed by SIGKILL (step 7, run rewards)\n"
    assert ending(scripts["is killed"]) == (-signal.SIGKILL, line)


def test_the_error_of_a_run_that_had_saved_says_how_to_resume(scripts: dict[str, subprocess.Popen[str]]) -> None:
    errors = ending(scripts["is killed after a save"])[1]
    assert errors.endswith("SIGKILL (step 7, run rewards); continue with `--trainer.ckpt_path last`, after step 5\n")


def test_a_run_that_has_printed_its_error_is_not_reported_again(scripts: dict[str, subprocess.Popen[str]]) -> None:
    assert ending(scripts["exits with 2 after a word of its own"]) == (2, "")


@pytest.mark.parametrize(("happening", "code"), [("its end", 0), ("the end of a failure", 2)])
def test_a_run_that_code_in_c_holds_at_its_end_exits_with_its_own_code_and_is_named(
    happening: str, code: int, scripts: dict[str, subprocess.Popen[str]]
) -> None:
    line = f"rlflow: rank 3 on {HERE}: code in C still held it 2 s after all was done; ended with it\n"
    assert ending(scripts[f"is held by C at {happening}"]) == (code, line)


def test_a_stopped_run_is_named_and_ended(scripts: dict[str, subprocess.Popen[str]]) -> None:
    code, line = ending(scripts["is stopped"])
    assert code == 1
    assert line.startswith(f"rlflow: error: rank 3 on {HERE} has not answered for ")
    assert line.endswith("(step 7, run rewards): it is stopped, or code in C holds its interpreter; ended the run\n")


def test_a_rank_that_others_wait_for_is_named_and_all_are_ended(scripts: dict[str, subprocess.Popen[str]]) -> None:
    late = f"rank 1 on {HERE} did not join the other ranks within `timeout_s` (60 s): it is at step 7, run rewards"
    assert ending(scripts["waits for a rank that does something else"]) == (
        1,
        f"rlflow: error: {late}; ended the run\n",
    )


def test_a_program_that_a_run_leaves_running_is_ended(scripts: dict[str, subprocess.Popen[str]]) -> None:
    script = scripts["leaves a program"]
    written, errors = script.communicate(timeout=300)
    assert (script.returncode, errors) == (0, "")
    assert not _runs(int(written.split()[-1]))


def test_a_run_that_takes_long_to_exit_is_not_ended(scripts: dict[str, subprocess.Popen[str]]) -> None:
    assert ending(scripts["takes long to leave"]) == (0, "")


def test_signals_that_are_sent_to_the_parent_reach_the_child(scripts: dict[str, subprocess.Popen[str]]) -> None:
    script = scripts["handles signals"]
    waiting(script)
    assert script.stdout is not None
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        script.send_signal(number)
        assert script.stdout.readline() == f"{number.name}\n"
    assert ending(script) == (0, "")


@contextlib.contextmanager
def on_a_terminal(happening: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A script that waits as the first process of a terminal's session, and the terminal's other end."""
    master, terminal = pty.openpty()

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    with subprocess.Popen(
        [sys.executable, str(SCRIPT), happening],
        env=os.environ | {"PYTHONPATH": str(SCRIPT.parents[2])},
        stdin=terminal,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=take_terminal,
    ) as script:
        os.close(terminal)
        waiting(script)
        yield script, master
        assert script.wait(60) == 0


def test_ctrl_c_on_a_terminal_reaches_the_child_once() -> None:
    with on_a_terminal("counts signals") as (script, master):
        os.write(master, b"\x03")
        assert script.stdout is not None
        assert script.stdout.readline() == "SIGINT\n"
    os.close(master)


def test_the_child_also_receives_the_signal_of_a_closed_terminal() -> None:
    with on_a_terminal("counts signals") as (script, master):
        os.close(master)
        assert script.stdout is not None
        assert script.stdout.readline() == "SIGHUP\n"


def test_the_child_of_a_parent_that_is_killed_dies_too(scripts: dict[str, subprocess.Popen[str]]) -> None:
    script = scripts["waits"]
    child = waiting(script)
    script.kill()
    deadline = time.monotonic() + 20
    while _runs(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_status_longer_than_its_place_is_cut() -> None:
    board = StatusBoard.make()
    board[1].write(1, "x" * 5000)
    assert (board[1].rank, board[1].doing) == (1, "x" * 512)
    assert board[0].doing == board[2].doing == AT_FIRST
    board[1].write(1, ENDED)
    assert StatusBoard(board.path)[1].ended


def test_a_missing_rank_is_one_that_is_stopped_else_one_that_does_not_wait() -> None:
    board, now = StatusBoard.make(), time.monotonic()
    for rank in range(4):
        board[rank].write(rank, f"step {rank}")
        board[rank].process, board[rank].heartbeat = 1, now + 30
    assert board.missing() is None
    board[0].failed, board[1].waits, board[3].heartbeat = now, 1, now - 60
    assert str(board.missing()).startswith(f"rank 3 on {HERE} has not answered for 60 s (step 3)")
    board[3].write(3, ENDED)
    assert board.missing() == f"rank 2 on {HERE} did not join the other ranks within their time limit: it is at step 2"


def test_an_exit_within_a_run_is_the_user_s_error() -> None:
    with pytest.raises(UserError, match=r"called `sys.exit\(\)`"), refusing_exits():
        raise SystemExit
