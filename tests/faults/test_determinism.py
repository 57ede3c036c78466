"""Two runs of one config write the same metrics to the byte, times aside.

That 1, 2 and 4 ranks draw the same prompts, train on the same mini-batches and log the same metrics is shown by
`tests/controller/test_ranks.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import own_folder
from tests.faults.running import fit
from tests.own_folder import TWO_RANKS, write

pytestmark = [pytest.mark.row("determinism"), pytest.mark.faults]
PASSING = ("time/", "tokens_per_second", "memory/")  # parts of names whose values are of the clock or the machine


def metrics(folder: Path, changes: dict[str, Any]) -> list[str]:
    """What a run logged of each step, as it is written."""
    folder.mkdir()
    own_folder.make(folder)
    write(folder / "my.yaml", {"module.class_path": "my_algorithm.ShortGRPO", "trainer.max_steps": 3} | changes)
    ended = fit(folder, "--config", "my.yaml")
    assert ended.code == 0, ended
    lines = map(json.loads, (folder / "runs/own/metrics.jsonl").read_text().splitlines())
    kept = [{name: of for name, of in line.items() if not any(part in name for part in PASSING)} for line in lines]
    assert [line["step"] for line in kept] == [1, 2, 3]
    assert all("actor/loss" in line for line in kept)
    return [json.dumps(line) for line in kept]


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_runs_of_one_config_log_the_same_to_the_byte(
    ranks: int, tmp_path: Path, seen: Callable[[str], None]
) -> None:
    changes = TWO_RANKS if ranks == 2 else {}
    assert metrics(tmp_path / "first", changes) == metrics(tmp_path / "second", changes)
    seen(f"equal to the byte on {ranks} rank(s)")
