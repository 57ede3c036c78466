"""Where a run's results lie."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlflow.errors import UserError
from rlflow.run.folder import RunFolder, require_folder
from rlflow.run.folder_lock import LOCK, FolderLock, require_own


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


def test_a_stranger_s_summary_beside_a_model_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("no JSON")
    summary = RunFolder.open(tmp_path / "run").write_summary({}, started_from=tmp_path / "qwen")
    assert list(summary["seconds"]) == ["run"]


def test_a_folder_is_one_run_s_until_its_process_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlflow.run.folder_lock.PATIENCE_S", 0.2)
    imports = "from pathlib import Path; from rlflow.run.folder_lock import FolderLock"
    takes = f"lock = FolderLock(Path('{tmp_path}/run')); lock.take(); print('locked', flush=True); input()"
    command = [sys.executable, "-c", f"{imports}; {takes}"]
    lock = FolderLock(tmp_path / "run")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
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
    assert list((tmp_path / "runs").iterdir()) == []
