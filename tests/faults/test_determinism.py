"""Two runs of one config write the same metrics to the byte, times aside; 1, 2 and 4 ranks draw the same prompts.

That they train on the same mini-batches and log the same metrics is shown by `tests/controller/test_ranks.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlflow.models.tiny import write_tiny_model
from tests import own_folder
from tests.controller.runs import ZERO2, Fit, RecordingSFT, answers
from tests.controller.runs import fit as fit_here
from tests.faults.running import fit
from tests.own_folder import TWO_RANKS, write
from tests.ranks import RankPool

pytestmark = [pytest.mark.row("determinism"), pytest.mark.slow]
PASSING = ("time/", "tokens_per_second", "memory/")  # parts of names whose values are of the clock or the machine


def metrics(folder: Path, changes: dict[str, Any]) -> list[str]:
    """The metrics of each step of a run, as they are written."""
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


def test_1_2_and_4_ranks_draw_the_same_prompts_at_every_step(
    tmp_path: Path, ranks2: RankPool, ranks4: RankPool, seen: Callable[[str], None]
) -> None:
    policy = write_tiny_model(tmp_path / "policy", layers=1)
    data = answers((3, 9, 1, 12, 5, 2, 7, 4), prompts_per_step=3)  # the third step begins the second pass

    def run(folder: str, **strategy: Any) -> Fit:
        return Fit(RecordingSFT(str(policy)), data, tmp_path / folder, settings={"max_steps": 5}, **strategy)

    alone = fit_here(run("1")).record["held"]
    assert [len(prompts) for prompts in alone] == [3] * 5
    assert {prompt for prompts in alone for prompt in prompts} == set(range(8))
    for ranks in (ranks2, ranks4):
        results = ranks.run(fit_here, run(f"{ranks.world_size}", strategy=ZERO2), timeout_s=200)
        held = [result.record["held"] for result in results]
        assert len(held) == ranks.world_size
        assert [[prompt for of_rank in held for prompt in of_rank[step]] for step in range(5)] == alone
        assert len({len(of_rank[0]) for of_rank in held}) > 1  # 3 prompts of 2 or 4 ranks: not all hold as many
    seen("1, 2 and 4 ranks draw the same prompts at each of 5 steps")
