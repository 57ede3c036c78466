"""Real processes that run a user's code, and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from rlflow.errors import UserError
from rlflow.worker import Limits, Worker, WorkerDied, WorkerRaised, WorkerTimeout
from rlflow.worker.worker import MARK
from tests.slow import slow_but

SHORT = Limits(timeout_s=1.0, memory_mb=2048, file_mb=4, output_kb=8)


@pytest.fixture(autouse=True)
def harm_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])


@pytest.fixture
def worker() -> Iterator[Worker]:
    with closing(Worker(SHORT)) as worker:
        yield worker


def test_functions_and_coroutines_give_their_values(worker: Worker) -> None:
    assert worker.function("harmful_code.add", 1, b=2.5) == 3.5
    assert worker.function("harmful_code.add_later", 1, 2) == 3
    assert worker.starts == 1


def test_an_object_is_kept_from_call_to_call(worker: Worker) -> None:
    worker.make("harmful_code.Counter")
    assert [worker.call("step"), worker.call("step", by=3)] == [1, 4]
    worker.make("harmful_code.Counter")
    assert worker.call("step") == 1


@pytest.mark.parametrize("function", ["spin", "spin_in_c"])
def test_what_takes_too_long_is_killed_within_its_time(worker: Worker, function: str) -> None:
    worker.function("harmful_code.add", 1, 2)  # it has started
    began = time.monotonic()
    with pytest.raises(WorkerTimeout, match=rf"`harmful_code.{function}` took longer than 1 s"):
        worker.function(f"harmful_code.{function}")
    assert time.monotonic() - began < 5
    assert not worker.runs
    assert worker.function("harmful_code.add", 1, 2) == 3, "the next call has a new process"


def test_a_call_that_raises_is_one_line_and_the_worker_still_works(worker: Worker) -> None:
    with pytest.raises(
        WorkerRaised, match=r"^`harmful_code.complain` raised ValueError at harmful_code.py:\d+: of two lines$"
    ):
        worker.function("harmful_code.complain")
    with pytest.raises(WorkerRaised, match=r"`harmful_code\.give_up` raised SystemExit"):
        worker.function("harmful_code.give_up")
    with pytest.raises(WorkerRaised, match=r"`harmful_code\.what_is_no_json` raised TypeError"):
        worker.function("harmful_code.what_is_no_json")
    with pytest.raises(WorkerRaised, match=r"`harmful_code\.nothing` raised AttributeError"):
        worker.function("harmful_code.nothing")
    assert worker.starts == 1


def test_a_fork_of_the_code_ends_and_answers_nobody(worker: Worker) -> None:
    codes = [worker.function("harmful_code.code_of_a_fork", does) for does in ("pass", "exit()", "exit(3)", "1 / 0")]
    assert codes == [0, 0, 1, 1]
    assert worker.function("harmful_code.add", 1, 2) == 3


def test_a_process_that_leaves_is_named_with_its_code_and_last_words() -> None:
    worker = Worker(Limits(timeout_s=30))
    with pytest.raises(
        WorkerDied, match=r"`harmful_code\.leave` ended its process with code 0; its last line was 'so long'"
    ):
        worker.function("harmful_code.leave")
    with pytest.raises(WorkerDied, match=r"`harmful_code\.close_the_pipes` closed the pipe of its answers"):
        worker.function("harmful_code.close_the_pipes")
    assert not worker.runs


def test_an_interpreter_that_prints_as_it_starts_is_not_in_the_way_of_answers(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a `.pth` file or `sitecustomize` may; what it reads is empty."""
    venv.create(tmp_path, symlinks=True)
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    (packages / "greeting.pth").write_text("import sys; print('welcome', repr(sys.stdin.read()))\n")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    assert worker.function("harmful_code.add", 1, 2) == 3
    worker.close()
    assert {*worker.printed.splitlines()} == {"welcome ''"}


def test_programs_that_the_code_starts_do_not_get_the_socket_of_answers(worker: Worker) -> None:
    assert worker.function("harmful_code.sockets_of_a_program") == 0


def test_memory_and_files_have_their_limits(worker: Worker, tmp_path: Path) -> None:
    with pytest.raises(WorkerRaised, match="raised MemoryError"):
        worker.function("harmful_code.take_memory")
    with pytest.raises((WorkerRaised, WorkerDied), match=r"File too large|SIGXFSZ"):
        worker.function("harmful_code.write_much", str(tmp_path / "much"))
    assert (tmp_path / "much").stat().st_size <= 4 << 20


def test_output_is_read_whatever_its_length_and_its_end_is_kept(worker: Worker) -> None:
    assert worker.function("harmful_code.talk", 100) == 100
    assert 0 < len(worker.printed) <= 8 << 10


def test_long_arguments_and_values_pass() -> None:
    with closing(Worker(Limits())) as worker:
        assert len(worker.function("harmful_code.add", "a" * (1 << 20), "b" * (1 << 20))) == 2 << 20


@pytest.mark.parametrize(
    ("function", "processes"), slow_but([("start_others", 3)], [("start_others", 3), ("start_a_large_one", 1)])
)
def test_no_process_that_a_worker_started_is_left(function: str, processes: int, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with closing(Worker(Limits(timeout_s=10))) as worker, pytest.raises(WorkerTimeout):
        worker.function(f"harmful_code.{function}", str(pids))
    started = [int(line) for line in pids.read_text().split()]
    assert len(started) == processes
    assert [pid for pid in started if _lives(pid)] == []


def test_a_worker_ends_with_an_orphan_that_a_call_left_and_else_takes_the_next(worker: Worker) -> None:
    worker.adopt()
    worker.close_if_others_run()
    assert worker.runs
    orphan = worker.function("harmful_code.leave_an_orphan", 60)
    assert _lives(orphan)
    worker.close_if_others_run()
    assert not worker.runs
    assert not _lives(orphan)


def test_the_end_of_a_worker_does_not_wait_for_a_process_that_may_still_print(worker: Worker) -> None:
    orphan, began = worker.function("harmful_code.leave_a_printer"), time.monotonic()
    worker.close()
    assert time.monotonic() - began < 20
    os.kill(orphan, signal.SIGKILL)


def test_an_orphan_that_ends_is_not_a_zombie_of_a_worker_that_adopts_none(worker: Worker) -> None:
    orphan, own = worker.function("harmful_code.leave_an_orphan", 60), worker.function("harmful_code.own_id")
    assert psutil.Process(own).children() == []
    os.kill(orphan, signal.SIGKILL)


def die(worker: Worker) -> int:
    """Kill its process, which it does not know; the id of that."""
    pid: int = worker.function("harmful_code.own_id")
    os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + 10
    while worker.runs and time.monotonic() < until:
        time.sleep(0.01)
    assert not worker.runs
    return pid


def test_the_id_of_a_process_that_died_is_its_own_until_all_is_killed(worker: Worker) -> None:
    pid = die(worker)
    assert psutil.Process(pid).ppid() == os.getpid(), "no other process may have it"
    worker.close()
    assert not psutil.pid_exists(pid)


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process without environment and arguments, as each has within `exec`, too shortly for a test to meet it."""
    environ, cmdline = psutil.Process.environ, psutil.Process.cmdline
    with subprocess.Popen(["sleep", "60"]) as process:
        monkeypatch.setattr(psutil.Process, "environ", lambda self: {} if self.pid == process.pid else environ(self))
        monkeypatch.setattr(psutil.Process, "cmdline", lambda self: [] if self.pid == process.pid else cmdline(self))
        yield process
        process.kill()


def test_another_s_program_that_starts_does_not_have_all_processes_looked_at_again(
    worker: Worker, starting: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    exe, process_iter = psutil.Process.exe, psutil.process_iter
    looks, scans = [], []

    def look(process: psutil.Process) -> str:
        looks.append(process.pid)
        if looks.count(starting.pid) == 50:
            starting.kill()
            starting.wait()
        return exe(process)

    die(worker)
    monkeypatch.setattr(psutil.Process, "exe", look)
    monkeypatch.setattr(psutil, "process_iter", lambda: scans.append(1) or process_iter())
    worker.close()
    assert looks.count(starting.pid) >= 50
    assert len(scans) < 10


def test_a_process_left_by_a_program_that_ends_during_the_search_is_killed(
    worker: Worker, starting: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    exe, left = psutil.Process.exe, []

    def look(process: psutil.Process) -> str:
        found = exe(process)
        if process.pid == starting.pid:
            left.append(subprocess.Popen(["sleep", "60"], env={MARK: worker._mark}))
            starting.kill()
            starting.wait()
        return found

    die(worker)
    monkeypatch.setattr(psutil.Process, "exe", look)
    worker.close()
    assert [process.wait(timeout=10) for process in left] == [-signal.SIGKILL]


def test_processes_that_multiply_are_killed() -> None:
    before = {process.pid for process in psutil.process_iter()}
    with closing(Worker(Limits(timeout_s=0.5))) as worker:
        worker.function("harmful_code.add", 1, 2)
        with pytest.raises(WorkerTimeout):
            worker.function("harmful_code.multiply")
    own = f'"parent": {os.getpid()},'  # in the arguments of this process's workers
    left = [p for p in psutil.process_iter() if p.pid not in before and _lives(p.pid) and own in _command(p.pid)]
    assert left == []


def test_a_worker_dies_with_the_process_that_made_it(tmp_path: Path) -> None:
    code = (
        f"import os, sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from rlflow.worker import Limits, Worker\n"
        "worker = Worker(Limits()); worker.function('harmful_code.add', 1, 2)\n"
        "print(worker._process.pid, flush=True); os.kill(os.getpid(), 9)\n"
    )

    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    pid = int(ran.stdout)
    until = time.monotonic() + 10
    while _lives(pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert not _lives(pid)


@pytest.mark.parametrize("name", ["timeout_s", "memory_mb", "file_mb", "output_kb"])
def test_limits_are_above_0(name: str) -> None:
    with pytest.raises(UserError, match=f"`{name}` is 0; give more than 0"):
        Limits(**{name: 0})


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""
