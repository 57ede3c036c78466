"""The runs that show faults, tried without a fault; and the table, tried on tests of nothing."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import own_folder
from tests.faults.running import Running, fit, left_over

pytestmark = pytest.mark.row("success means success")


@pytest.mark.slow
def test_a_run_without_a_fault_ends_with_code_0_and_leaves_nothing(tmp_path: Path, seen: Callable[[str], None]) -> None:
    own_folder.make(tmp_path)
    with left_over(tmp_path) as left:
        ended = fit(tmp_path, "--config", "my.yaml")
    assert (ended.code, left) == (0, []), ended
    seen("a run without a fault ends with code 0")


@pytest.mark.slow
def test_ranks_are_found_by_their_numbers(tmp_path: Path) -> None:
    own_folder.make(tmp_path)
    own_folder.write(tmp_path / "my.yaml", own_folder.TWO_RANKS)
    with left_over(tmp_path) as left, Running(tmp_path, "fit", "--config", "my.yaml") as run:
        ranks = run.ranks(2)
        assert sorted(ranks) == [0, 1]
        ranks[1].kill()
        ended = run.ended()
    assert ended.code == 1
    assert f"rank 1 on {socket.gethostname()} was killed by SIGKILL" in ended.last, ended
    assert left == []


HERE = Path(__file__).parent
LEAKS = """
import pytest
from tests import helper

pytestmark = pytest.mark.row("leaks")


@pytest.mark.parametrize("number", range(5))
def test_of_leaks(number, seen, counted, measured):
    seen("no leak")
    counted("tests of leaks")
    counted("kinds", str(number % 2))
    measured("{:.1f} kB", number)
"""
OF_ANOTHER = """
import pytest


@pytest.mark.row("determinism")
def test_of_determinism(): ...
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of its own with two rows of the table: five tests and one."""
    faults = tmp_path / "tests/faults"
    faults.mkdir(parents=True)
    for name in ("__init__.py", "passed_tests.py", "faults/__init__.py", "faults/promises.py"):
        shutil.copy(HERE.parent / name, tmp_path / "tests" / name)
    (tmp_path / "tests/conftest.py").write_text('pytest_plugins = ["tests.passed_tests"]\n')
    (tmp_path / "tests/helper.py").touch()
    (faults / "test_leaks.py").write_text(LEAKS)
    (faults / "test_other.py").write_text(OF_ANOTHER)
    return tmp_path


def table(project: Path, *options: str) -> tuple[int, str]:
    """The exit code of such a call, and what it printed; at once where all has passed."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/faults", *options]
    environment = {**os.environ, "PYTHONPATH": str(project), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def ran(project: Path) -> list[int]:
    """The five tests that have run."""
    return [int(name[-2]) for name in json.loads((project / "runs/passed.json").read_text())]


def test_a_row_is_run_in_parts_whatever_has_passed_before_and_is_printed_as_a_whole(project: Path) -> None:
    code, printed = table(project, "--rows=leaks", "--part=2/2")
    assert (code, ran(project)) == (0, [1, 3])
    assert "leaks: 2 of 5 tests passed" in printed
    assert "6 deselected" in table(project, "--rows=leaks", "--part=2/2")[1]
    code, printed = table(project, "--rows=leaks", "--part=1/2")
    assert (code, ran(project)) == (0, [1, 3, 0, 2, 4])
    assert "leaks: 5 of 5 tests passed" in printed
    assert "| 5 tests of leaks; 2 kinds; 0.0 to 4.0 kB; no leak\n" in printed
    assert "determinism:" not in printed


@pytest.mark.slow
def test_tests_that_passed_in_two_processes_are_all_stored(project: Path) -> None:
    many = LEAKS.replace("range(5)", "range(300)")
    (project / "tests/faults/test_leaks.py").write_text(many)
    assert table(project, "--rows=leaks", "-p", "xdist", "-n", "2")[0] == 0
    assert len(json.loads((project / "runs/passed.json").read_text())) == 300


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "1/0", "a/b", "-1/2"])
def test_a_part_that_is_none_is_refused(part: str, project: Path) -> None:
    code, printed = table(project, "--rows=leaks", f"--part={part}")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert f"{part!r} is not a part such as 1/2" in printed


def test_a_part_without_rows_is_refused(project: Path) -> None:
    code, printed = table(project, "--part=1/2")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "--part is of the tests of rows" in printed


@pytest.mark.parametrize("rows", ["nonsense", "leaks,nonsense", "leaks,"])
def test_a_name_that_no_row_has_is_refused_and_the_rows_are_named(rows: str, project: Path) -> None:
    code, printed = table(project, f"--rows={rows}")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert f"no row's name has {rows.removeprefix('leaks,')!r} in it; the rows are: bit-exact resume; " in printed


SKIPPED = {
    "a test": ("test_other.py", OF_ANOTHER.replace("...", "pytest.skip('')")),
    "its fixture": ("test_other.py", OF_ANOTHER.replace("@pytest.mark", "@pytest.mark.skip\n@pytest.mark", 1)),
    "an expected failure": ("test_other.py", OF_ANOTHER.replace("...", "pytest.xfail('')")),
    "a file": ("test_more.py", "import pytest\npytest.skip('', allow_module_level=True)\n"),
}


@pytest.mark.parametrize(("name", "source"), SKIPPED.values(), ids=SKIPPED.keys())
def test_what_is_skipped_has_not_passed_and_the_call_fails(name: str, source: str, project: Path) -> None:
    (project / "tests/faults" / name).write_text(source)
    code, printed = table(project, "--rows=")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert f"skipped, so nothing is shown: tests/faults/{name}" in printed
    assert f"determinism: {int(name != 'test_other.py')} of 1 tests passed" in printed
    assert table(project, "--rows=")[0] == pytest.ExitCode.TESTS_FAILED  # it is tried again


CHANGES = {
    "tests/helper.py": (5, 1),
    "tests/faults/test_leaks.py": (5, 1),
    "tests/conftest.py": (6, 0),
    "rlflow/model.py": (6, 0),
    "algorithms/ppo.py": (6, 0),
    "configs/ppo.yaml": (6, 0),
    "requirements/cpu.lock": (6, 0),
    "tests/unused.py": (0, 6),
    "README.md": (0, 6),
}


def test_a_test_that_passed_is_run_again_only_after_what_it_depends_on_has_changed(project: Path) -> None:
    assert "6 passed" in table(project, "--rows=")[1]
    for name, (again, not_again) in CHANGES.items():
        file = project / name
        file.parent.mkdir(exist_ok=True)
        with file.open("a") as changed:
            changed.write("# changed\n")
        code, printed = table(project, "--rows=")
        assert code == 0
        assert (f"{again} passed" in printed) == bool(again), (name, printed)
        assert (f"{not_again} deselected" in printed) == bool(not_again), (name, printed)


def test_a_helper_that_a_text_names_counts(project: Path) -> None:
    helpers = {"stalls.py": "import beside\n", "beside.py": "", "far.py": "", "of_a_text.py": "", "unnamed.py": ""}
    for name, source in helpers.items():
        (project / "tests/faults" / name).write_text(source)
    texts = ["stalls.py", "tests.faults.far.Class", "of_a_text.{kind}", "unnamed"]
    (project / "tests/faults/test_other.py").write_text(f"{OF_ANOTHER}\nTEXTS = {texts}\n")
    table(project, "--rows=determinism")
    for name in helpers:
        (project / "tests/faults" / name).write_text("# changed\n" + helpers[name])
        assert ("1 passed" in table(project, "--rows=determinism")[1]) == (name != "unnamed.py"), name
