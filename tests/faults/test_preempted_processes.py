"""Signals from outside, to processes as users start them."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import own_folder
from tests.faults import preempted
from tests.faults.running import COMMAND, Ended, Running, left_over

pytestmark = pytest.mark.row("preemption")

TWO_RANKS = {key.replace(".", "__"): value for key, value in own_folder.TWO_RANKS.items()}
SAVED = "ended by {}: runs/own/checkpoint/step-00000001 is saved; continue with `--trainer.ckpt_path last`"
BEFORE = "if anything was saved before, it is still there: continue with `--trainer.ckpt_path last`"
ROOT = Path(__file__).parents[2]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "rlflow.cli")


def interrupted(
    folder: Path,
    send: Callable[[Running], None],
    *arguments: str,
    seconds: float,
    command: tuple[str, ...] = COMMAND,
) -> Ended:
    """A run that waits so long before the rewards of its second step, and what is sent to it meanwhile."""
    given = "fit", "--config", "my.yaml", preempted.waits("run rewards", 1, seconds), *arguments
    with left_over(folder) as left, Running(folder, *given, command=command) as run:
        until = time.monotonic() + 200
        while not (folder / "waits-0").exists():
            assert run.process.poll() is None, run.errors
            assert time.monotonic() < until, run.errors
            time.sleep(0.05)
        send(run)
        ended = run.ended(300)
        time.sleep(1)  # a rank looks every so often whether the first one is there
    assert left == []
    return ended


@pytest.mark.slow
def test_a_signal_to_the_user_s_process_ends_two_ranks_with_one_line_and_code_3(tmp_path: Path) -> None:
    folder = preempted.make(tmp_path, **TWO_RANKS)
    ended = interrupted(folder, lambda run: run.process.terminate(), seconds=0.5)
    assert (ended.code, ended.errors) == (3, f"rlflow: {SAVED.format('SIGTERM')}\n")


@pytest.mark.slow
def test_ctrl_c_reaches_every_process_of_the_group_and_is_one_signal(tmp_path: Path) -> None:
    folder = preempted.make(tmp_path, **TWO_RANKS)
    ended = interrupted(folder, lambda run: os.killpg(run.process.pid, signal.SIGINT), seconds=0.5)
    assert (ended.code, ended.errors) == (3, f"rlflow: {SAVED.format('SIGINT')}\n")


def hang_up(run: Running) -> None:
    """Hang up as a shell does to its processes when its terminal is closed."""
    os.killpg(run.process.pid, signal.SIGHUP)


@pytest.fixture
def hangs_up() -> Iterator[None]:
    """A process that is started hears SIGHUP, also where the tests run below `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
@pytest.mark.usefixtures("hangs_up")
def test_a_terminal_that_is_closed_ends_the_run_with_its_state_saved(
    tmp_path: Path, seen: Callable[[str], None]
) -> None:
    ended = interrupted(preempted.make(tmp_path, **TWO_RANKS), hang_up, seconds=0.5)
    assert (ended.code, ended.errors) == (3, f"rlflow: {SAVED.format('SIGHUP')}\n")
    seen("SIGHUP to the process group, as when a terminal is closed: saved")


@pytest.mark.slow
def test_below_nohup_a_terminal_that_is_closed_changes_nothing(tmp_path: Path) -> None:
    folder = preempted.make(tmp_path, **TWO_RANKS)
    ended = interrupted(folder, hang_up, seconds=0.5, command=("nohup", *COMMAND))
    assert ended.code == 0, ended
    assert len(preempted.left(folder / "runs/own")[1]) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("hangs_up")
def test_a_run_whose_session_has_lost_its_terminal_saves_its_state(tmp_path: Path) -> None:
    """The kernel tells the session's first process alone, which is the one that waits for the ranks."""
    folder = preempted.make(tmp_path)
    master, terminal = pty.openpty()
    arguments = ["fit", "--config", "my.yaml", preempted.waits("run rewards", 1, 2.0)]
    with subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(terminal, termios.TIOCSCTTY, 0),
    ) as run:
        os.close(terminal)
        until = time.monotonic() + 200
        while not (folder / "waits-0").exists():
            assert time.monotonic() < until
            os.read(master, 4096)
        os.close(master)
        assert run.wait(60) == 3
    assert (folder / "runs/own/checkpoint/step-00000001").is_dir()


@pytest.mark.slow
def test_a_second_signal_ends_the_run_immediately(tmp_path: Path, seen: Callable[[str], None]) -> None:
    def twice(run: Running) -> None:
        run.process.terminate()
        time.sleep(3)
        run.process.terminate()

    ended = interrupted(preempted.make(tmp_path, **TWO_RANKS), twice, seconds=120)
    line = f"rlflow: ended by SIGTERM: another SIGTERM came before the state was saved; {BEFORE}\n"
    assert (ended.code, ended.errors) == (3, line)
    seen("a second SIGTERM ends it at once")


@pytest.mark.slow
def test_the_end_of_the_grace_ends_the_run(tmp_path: Path) -> None:
    folder = preempted.make(tmp_path, **TWO_RANKS)
    ended = interrupted(folder, lambda run: run.process.terminate(), "--trainer.grace_s=4", seconds=120)
    line = f"rlflow: ended by SIGTERM: 4 s (`trainer.grace_s`) were over before the run had ended; {BEFORE}\n"
    assert (ended.code, ended.errors) == (3, line)


@pytest.mark.slow
def test_a_run_that_has_not_begun_ends_immediately(tmp_path: Path) -> None:
    folder = preempted.make(tmp_path)
    with left_over(folder) as left, Running(folder, "fit", "--config", "my.yaml") as run:
        run.ranks(1)
        time.sleep(2)  # it imports
        run.process.terminate()
        ended = run.ended(120)
    what = "the run had not begun, so nothing more was saved; start it again with the same command"
    line = f"rlflow: ended by SIGTERM: {what}\n"
    assert (ended.code, ended.errors, left) == (3, line, [])


@pytest.mark.slow
def test_a_signal_to_torchruns_agent_reaches_the_ranks_which_save_and_resume(
    tmp_path: Path, seen: Callable[[str], None]
) -> None:
    folder = preempted.make(tmp_path, **TWO_RANKS)
    ended = interrupted(folder, lambda run: run.process.terminate(), seconds=0.5, command=TORCHRUN)
    assert ended.code == 1  # of the agent, whatever its ranks end with
    assert ended.errors.count("rlflow: ") == 1
    assert f"rlflow: {SAVED.format('SIGTERM')}\n" in ended.errors
    with Running(folder, "fit", "--config", "my.yaml", "--trainer.ckpt_path=auto", command=TORCHRUN) as run:
        assert run.ended(300).code == 0
    assert [line["step"] for line in preempted.left(folder / "runs/own")[1]] == [1, 2, 3]
    seen("SIGTERM to torchrun's agent: saved, and gone on")
