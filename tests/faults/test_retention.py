"""The last good checkpoint is never lost, wherever saving or removing is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.killed_saves import CASES

pytestmark = pytest.mark.row("retention, asynchronous writing")

PROJECT = Path(__file__).parents[2]


def killed(folder: Path, *cases: str) -> dict[str, int]:
    """Number of times that a save of each case was killed."""
    command = [sys.executable, "-m", "tests.faults.killed_saves", str(folder), *cases]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.slow
def test_no_kill_while_checkpoints_are_written_and_removed_loses_the_last_good_one(
    tmp_path: Path, seen: Callable[[str], None]
) -> None:
    times = killed(tmp_path)
    assert times.keys() == CASES.keys()
    assert all(count >= 15 for count in times.values()), times
    assert times["next"] > times["first"]  # an older one is removed
    seen(f"{sum(times.values())} kills of a save, at each event of the file system")
