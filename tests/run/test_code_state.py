"""Record that a run makes of the code that it was started with."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from rlflow import RLModule
from rlflow.algorithms import SFT
from rlflow.run.code_state import code_of


def git(folder: Path, *arguments: str) -> str:
    names = ("-c", "user.name=me", "-c", "user.email=me@example.org", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *names, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with an algorithm, which is the working directory."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):  # of a hook that runs the tests
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "algorithm_of_mine.py").write_text("from rlflow import RLModule\n\nclass Mine(RLModule): ...\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def mine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> RLModule:
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "algorithm_of_mine", raising=False)
    made: RLModule = import_module("algorithm_of_mine").Mine()
    return made


def test_the_commit_and_whether_tracked_files_changed_are_recorded(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD").strip()
    (repository / "runs").mkdir()
    (repository / "runs/metrics.jsonl").write_text("")  # what is not tracked is not a change
    clean = {"repository": str(repository), "commit": commit, "changed": False}
    assert code_of(SFT("tiny"))["code"] == clean
    (repository / "algorithm_of_mine.py").write_text("changed = True\n")
    assert code_of(SFT("tiny"))["code"] == clean | {"changed": True}


def test_a_module_of_ones_own_counts_and_not_the_working_directory(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert code_of(SFT("tiny"))["code"] == {}
    module = mine(repository, monkeypatch)
    assert code_of(module)["code"]["changed"] is False
    git(repository, "rm", "--quiet", "--cached", "algorithm_of_mine.py")
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "without it")
    assert code_of(module)["code"]["changed"] is True  # the commit does not have the file


def test_names_of_files_in_another_encoding_are_read(repository: Path) -> None:
    git(repository, "config", "core.quotepath", "false")
    name = os.fsencode(repository) + b"/caf\xe9.txt"
    Path(os.fsdecode(name)).write_text("one")
    git(repository, "add", ".")
    Path(os.fsdecode(name)).write_text("two")
    assert code_of(SFT("tiny"))["code"]["changed"] is True


def test_whether_files_changed_is_unknown_where_git_is_slow_to_say(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, program = mine(repository, monkeypatch), repository / "git"
    program.write_text(f'#!/bin/sh\ncase "$*" in *ls-files*) sleep 60;; esac\nexec {shutil.which("git")} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{repository}:{os.environ['PATH']}")
    monkeypatch.setattr("rlflow.run.code_state.PATIENCE_S", 1.0)
    found = code_of(module)["code"]
    assert (found["repository"], found["changed"]) == (str(repository), None)


def test_without_git_there_are_versions_alone(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(repository))
    found = code_of(SFT("tiny"))
    assert found["code"] == {}
    assert {"rlflow-llm", "torch", "transformers"} <= found["versions"].keys()


def test_a_git_that_hangs_is_not_waited_for(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (repository / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{repository}:/usr/bin:/bin")
    monkeypatch.setattr("rlflow.run.code_state.PATIENCE_S", 0.1)
    assert code_of(SFT("tiny"))["code"] == {}
