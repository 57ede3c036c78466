"""The runs by which faults are shown, tried on a run without any."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import own_folder
from tests.faults.running import Running, fit, left_over

pytestmark = pytest.mark.row("success means success")


def test_a_run_without_a_fault_ends_with_code_0_and_leaves_nothing(tmp_path: Path, seen: Callable[[str], None]) -> None:
    own_folder.make(tmp_path)
    with left_over(tmp_path) as left:
        ended = fit(tmp_path, "--config", "my.yaml")
    assert (ended.code, left) == (0, []), ended
    seen("a run without a fault ends with code 0")


@pytest.mark.faults
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
