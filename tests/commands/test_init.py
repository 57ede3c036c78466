"""`rlflow init` writes a folder that works as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlflow.cli import main
from rlflow.commands.init import init
from rlflow.errors import UserError

FILES = ["README.md", "algorithm.py", "config.yaml", "data.jsonl", "rewards.py", "test_project.py"]


def test_init_writes_a_project_whose_graph_can_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["init", str(tmp_path / "mine")])
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == FILES
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "mine"), *sys.path])
    main(["graph", "--config", "config.yaml"])
    assert "advantages" in capsys.readouterr().out
    for name in ("algorithm", "rewards"):
        sys.modules.pop(name, None)


def test_the_printed_next_command_can_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    init(tmp_path / "my project")
    assert f"next: cd '{tmp_path}/my project' && rlflow" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_reported_in_one_line() -> None:
    with pytest.raises(UserError, match=r"`/proc/mine` cannot be written: .*No such file or .*; name another"):
        init(Path("/proc/mine"))


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    init(tmp_path / "empty")
    (tmp_path / "other").mkdir()
    init(tmp_path / "other")
    with pytest.raises(UserError, match="is there and not empty, and nothing is overwritten; name a new folder"):
        init(tmp_path / "empty")


@pytest.mark.slow
def test_the_project_trains_and_its_tests_pass(tmp_path: Path) -> None:
    init(tmp_path / "mine")
    commands = (
        ["-m", "rlflow.cli", "fit", "--config", "config.yaml", "--trainer.max_steps", "2"],
        ["-m", "pytest", "-q", "-p", "no:cacheprovider"],
    )
    for command in commands:
        subprocess.run([sys.executable, *command], cwd=tmp_path / "mine", check=True, timeout=300)
    assert (tmp_path / "mine/runs/first/model/config.json").exists()
