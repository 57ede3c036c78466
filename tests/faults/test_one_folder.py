"""A run's folder is its own: a second run in it is refused, and a folder of somebody else's is not changed.

That loggers go on after a torn last line is shown by `tests/loggers`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import own_folder
from tests.faults.running import Ended, Running, fit
from tests.own_folder import rewarded_by, write

pytestmark = [pytest.mark.row("two runs, one folder"), pytest.mark.slow]
SLOW = "\n\ndef slow(response, row):\n    time.sleep(0.25)\n    return float(len(response))\n"  # 2 s a step


def folders(path: Path) -> tuple[Path, Path]:
    """Two to start from, whose runs write to one."""
    made = path / "first", path / "second"
    for folder in made:
        folder.mkdir()
        own_folder.make(folder)
        (folder / "my_rewards.py").write_text(own_folder.FILES["my_rewards.py"] + SLOW)
        changes = {"trainer.run_dir": str(path / "run"), "trainer.save_every_n_steps": 1, "trainer.max_steps": 5}
        write(folder / "my.yaml", changes | rewarded_by("slow"))
    return made


def together(made: tuple[Path, Path], *options: str) -> tuple[Ended, Ended]:
    """The one that had the folder, and the other."""
    arguments = ("fit", "--config", "my.yaml", *options)
    with Running(made[0], *arguments) as one, Running(made[1], *arguments) as other:
        first, second = sorted((one.ended(), other.ended()), key=lambda ended: ended.code)
    return first, second


def require_refused(ended: Ended, run: Path) -> None:
    assert ended.code == 2, ended
    (line,) = ended.errors.splitlines()
    assert line.startswith(f"rlflow: error: `trainer.run_dir` is '{run}', where another run writes (process "), line


def steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_of_two_runs_that_start_together_the_second_is_refused(tmp_path: Path, seen: Callable[[str], None]) -> None:
    first, second = together(folders(tmp_path))
    assert first.code == 0, first
    require_refused(second, tmp_path / "run")
    assert steps(tmp_path / "run") == [1, 2, 3, 4, 5]
    assert not (tmp_path / "run-1").exists()
    seen("started together: the second refused in a line")


def test_of_two_runs_that_resume_together_the_second_is_refused(tmp_path: Path, seen: Callable[[str], None]) -> None:
    made = folders(tmp_path)
    assert fit(made[0], "--config", "my.yaml", "--trainer.max_steps", "1").code == 0
    first, second = together(made, "--trainer.ckpt_path", "last")
    assert first.code == 0, first
    require_refused(second, tmp_path / "run")
    assert steps(tmp_path / "run") == [1, 2, 3, 4, 5]
    seen("resumed together: the second refused in a line")


def test_a_run_that_was_killed_holds_no_folder(tmp_path: Path, seen: Callable[[str], None]) -> None:
    made = folders(tmp_path)
    with Running(made[0], "fit", "--config", "my.yaml") as run:
        first = run.ranks(1)[0]
        while not (tmp_path / "run/checkpoint").exists() and first.is_running():
            pass
        first.kill()
        assert run.ended().code == -9
    assert fit(made[1], "--config", "my.yaml", "--trainer.max_steps", "1").code == 0
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith("run")} == {"run", "run-1"}
    seen("free again when the first was killed")


def test_a_folder_of_somebody_else_s_is_left_as_it_is(tmp_path: Path, seen: Callable[[str], None]) -> None:
    made = folders(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.tex").write_text("three years")
    ended = fit(made[0], "--config", "my.yaml")
    assert ended.code == 2
    (line,) = ended.errors.splitlines()
    assert "has files that no run made ('thesis.tex' is one)" in line
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]
    assert not (tmp_path / "run-1").exists()
    seen("files of others neither moved nor joined")
