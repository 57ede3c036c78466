"""Several workers share the tests, whole files each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.scheduling import SECONDS, TOGETHER

ROOT = Path(__file__).parent.parent
HOOKS = "from tests.scheduling import pytest_addoption, pytest_collection_modifyitems, pytest_xdist_make_scheduler"
FILE = """
import pytest

@pytest.fixture(scope="module")
def made():
    with open("made.txt", "a") as file:
        print("{name}", file=file)

@pytest.mark.parametrize("number", range(8))
def test_of_a_file(made, number): ...
"""


def test_a_fixture_of_a_module_is_made_once_and_the_longest_files_start_first(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    for name in ("one", "two", "three", "four"):
        (tests / f"test_{name}.py").write_text(FILE.format(name=name))
    (tests / "__init__.py").touch()
    (tests / "conftest.py").write_text(HOOKS)
    (tests / "scheduling.py").write_text((ROOT / "tests/scheduling.py").read_text())
    (tests / "seconds.json").write_text(json.dumps({"tests/test_two.py": 20, "tests/test_three.py": 30}))
    command = [sys.executable, "-m", "pytest", "-n", "2", "tests"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    made = (tmp_path / "made.txt").read_text().split()
    assert sorted(made) == ["four", "one", "three", "two"]
    assert made[0] in ("two", "three")


def test_times_are_of_files_that_exist() -> None:
    assert [name for name in json.loads(SECONDS.read_text()) if not (ROOT / name).exists()] == []
    assert (ROOT / TOGETHER).is_dir()
