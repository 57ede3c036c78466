"""The folder of a run's results."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlflow import Trainer
from rlflow.errors import UserError
from rlflow.run.folder import LOCK, FolderLock, RunFolder, require_folder, require_own
from tests import own_folder


@contextlib.contextmanager
def taking(folder: Path, then: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process that has locked the folder, and does `then` on request."""
    imports = "import time; from pathlib import Path; from rlflow.run.folder import FolderLock"
    takes = f"lock = FolderLock(Path({str(folder)!r})); lock.take(); print('locked', flush=True); input(); {then}"
    command = [sys.executable, "-c", f"{imports}; {takes}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        yield other
        other.kill()


def test_what_lay_in_the_folder_is_kept_under_other_names(tmp_path: Path) -> None:
    for content in "abc":
        RunFolder.open(tmp_path / "run").config.write_text(content)
    assert {path.name: (path / "config.yaml").read_text() for path in tmp_path.iterdir()} == {
        "run-1": "a",
        "run-2": "b",
        "run": "c",
    }


def test_an_empty_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    RunFolder.open(tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_that_starts_from_another_run_s_model_carries_on_its_seconds(tmp_path: Path) -> None:
    first, second = (RunFolder.open(tmp_path / name) for name in ("sft", "grpo"))
    first.write_summary({"steps": 1}, started_from=Path("tiny"))
    summary = second.write_summary({"steps": 2}, started_from=first.model)
    assert list(summary["seconds"]) == ["sft", "grpo"]
    assert json.loads(second.summary.read_text()) == summary


def test_a_stranger_s_summary_in_a_folder_with_a_model_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("no JSON")
    summary = RunFolder.open(tmp_path / "run").write_summary({}, started_from=tmp_path / "qwen")
    assert list(summary["seconds"]) == ["run"]


def test_a_folder_is_one_run_s_until_its_process_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlflow.run.folder.PATIENCE_S", 0.2)
    lock = FolderLock(tmp_path / "run")
    with taking(tmp_path / "run") as other:
        with pytest.raises(UserError, match=rf"where another run writes \(process {other.pid} on "):
            lock.take()
        other.kill()
    lock.take()
    assert (tmp_path / "run" / LOCK).read_text().startswith(f"process {os.getpid()} on ")
    lock.release()


def test_a_lock_follows_the_folder_that_takes_the_place_of_one_that_is_moved(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "run")
    lock.take()
    lock.take()  # once more, and it is still held
    RunFolder(tmp_path / "run").config.touch()
    RunFolder.open(tmp_path / "run")
    lock.take()
    assert (tmp_path / "run-1" / "config.yaml").exists()
    assert (tmp_path / "run" / LOCK).read_text().startswith(f"process {os.getpid()} on ")
    lock.release()


def test_a_folder_with_files_of_somebody_else_s_is_refused_as_it_is(tmp_path: Path) -> None:
    require_own(tmp_path / "new")
    require_own(tmp_path)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"has files that no run made \('thesis.tex' is one\)"):
        require_own(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_link_to_a_folder_that_is_gone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match="a link to what is not there; name a folder"):
        require_folder(tmp_path / "run")


def test_ranks_that_look_at_the_same_time_all_find_the_folder_free(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(require_folder, [tmp_path / "runs" / "own"] * 4000):
            pass
    assert list(tmp_path.iterdir()) == []


def test_a_lock_on_a_folder_that_was_not_used_leaves_nothing(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "runs/all/own")
    lock.take()
    assert (tmp_path / "runs/all/own" / LOCK).exists()
    lock.release()
    assert list(tmp_path.iterdir()) == []
    lock.take()
    lock.use()
    lock.release()
    assert (tmp_path / "runs/all/own" / LOCK).exists()


def test_releasing_a_lock_removes_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    lock = FolderLock(tmp_path / "there")
    lock.take()
    lock.release()
    assert list((tmp_path / "there").iterdir()) == []
    (tmp_path / "there" / LOCK).write_text("of a run before")
    lock.take()
    lock.release()
    assert [path.name for path in (tmp_path / "there").iterdir()] == [LOCK]
    lock = FolderLock(tmp_path / "runs/own")
    lock.take()
    (tmp_path / "runs/another").mkdir()
    lock.release()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["another"]


def test_a_lock_that_another_run_has_put_in_the_place_of_this_one_s_stays(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "run")
    lock.take()
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).write_text("process 1 on another")
    lock.release()
    assert (tmp_path / "run" / LOCK).read_text() == "process 1 on another"
    assert (tmp_path / "moved" / LOCK).exists()


def test_nothing_is_removed_where_the_file_system_has_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def has_none(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", has_none)
    lock = FolderLock(tmp_path / "run")
    lock.take()
    lock.release()
    assert (tmp_path / "run" / LOCK).exists()


def test_a_run_that_waits_for_a_folder_makes_it_again_if_a_refused_run_removes_it(tmp_path: Path) -> None:
    with taking(tmp_path / "runs/own", "lock.release(); print('gone', flush=True); input()") as other:
        lock = FolderLock(tmp_path / "runs/own")
        with ThreadPoolExecutor(1) as pool:
            taken = pool.submit(lock.take)
            assert other.stdin is not None
            assert other.stdout is not None
            print(file=other.stdin, flush=True)
            assert other.stdout.readline() == "gone\n"
            taken.result()
        assert (tmp_path / "runs/own" / LOCK).read_text().startswith(f"process {os.getpid()} on ")
        lock.release()
    assert not (tmp_path / "runs/own" / LOCK).exists()


def test_a_refused_run_leaves_the_folder_of_the_one_that_writes_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlflow.run.folder.PATIENCE_S", 0.2)
    with taking(tmp_path / "run") as other:
        lock = FolderLock(tmp_path / "run")
        with pytest.raises(UserError, match=rf"where another run writes \(process {other.pid} on "):
            lock.take()
        lock.release()
        assert (tmp_path / "run" / LOCK).read_text().startswith(f"process {other.pid} on ")


def test_looking_whether_a_folder_can_be_made_leaves_nothing(tmp_path: Path) -> None:
    require_folder(tmp_path / "runs/all/own")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match="a link to what is not there; name a folder"):
        require_folder(tmp_path / "link/own")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"which cannot be made \(Not a directory\)"):
        require_folder(tmp_path / "file/own")


def test_ranks_look_while_a_refused_run_removes_what_it_made(tmp_path: Path) -> None:
    done = threading.Event()

    def make_and_remove() -> None:
        while not done.is_set():
            with contextlib.suppress(OSError):  # a rank looks in it
                (tmp_path / "runs").mkdir(exist_ok=True)
                (tmp_path / "runs").rmdir()

    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        stack.callback(done.set)
        pool.submit(make_and_remove)
        for _ in range(2000):
            require_folder(tmp_path / "runs/own")


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", "null", '{"seconds": 3}', '{"seconds": {"first": "long"}}', "\x00"]
)
def test_a_damaged_summary_of_an_earlier_run_costs_its_times_alone(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (RunFolder.open(tmp_path / name) for name in ("first", "second"))
    first.summary.write_text(content)
    assert list(second.write_summary({}, started_from=first.model)["seconds"]) == ["second"]
    assert f"warning: {first.summary} is damaged (" in capsys.readouterr().out


def test_a_trainer_takes_a_path_for_its_folder(tmp_path: Path) -> None:
    assert Trainer(tmp_path / "mine").settings.folder == tmp_path / "mine"  # type: ignore[arg-type]


def test_a_folder_takes_any_number_of_runs_one_after_another(tmp_path: Path) -> None:
    own_folder.make(tmp_path)
    for _ in range(3):
        own_folder.command(tmp_path, "fit", "--config", "my.yaml", "--trainer.max_steps", "1")
    assert all((tmp_path / "runs" / name / LOCK).is_file() for name in ("own", "own-1", "own-2"))
