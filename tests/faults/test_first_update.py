"""A run whose first steps made no update resumes as if it had not been interrupted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import own_folder
from tests.faults.running import Running
from tests.own_folder import TWO_RANKS, write

pytestmark = pytest.mark.row("bit-exact resume")
REWARDS = """
from pathlib import Path

calls = [0]


def late(response, row):
    calls[0] += 1
    if calls[0] * int(Path("ranks").read_text()) <= 8 and not Path("good").exists():
        return float("nan")
    return float(len(response) % 3)
"""


def steps(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs/own/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        pytest.param(1, {}, id="one rank"),
        pytest.param(2, TWO_RANKS, id="ZeRO-2", marks=pytest.mark.slow),
        pytest.param(
            2,
            {**TWO_RANKS, "strategy": {"class_path": "rlflow.strategies.FSDPStrategy"}},
            id="FSDP",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_resumes_from_before_its_first_update(ranks: int, more: dict[str, Any], tmp_path: Path) -> None:
    own_folder.make(tmp_path)
    (tmp_path / "late.py").write_text(REWARDS)
    (tmp_path / "ranks").write_text(str(ranks))
    reward = {"class_path": "rlflow.rewards.CallableReward", "init_args": {"function": "late.late", "on_error": "drop"}}
    write(tmp_path / "my.yaml", {**more, "module.init_args.reward": reward, "trainer.save_every_n_steps": 1})

    def run(*options: str) -> list[dict[str, Any]]:
        if ranks == 1:
            own_folder.command(tmp_path, "fit", "--config", "my.yaml", *options)
            return steps(tmp_path)
        with Running(tmp_path, "fit", "--config", "my.yaml", *options) as running:
            ended = running.ended()
        assert ended.code == 0, ended
        return steps(tmp_path)

    whole = run()
    weights = {p.name: p.read_bytes() for p in (tmp_path / "runs/own/model").glob("*.safetensors")}
    shutil.rmtree(tmp_path / "runs")
    run("--trainer.max_steps", "1")
    (tmp_path / "good").touch()
    resumed = run("--trainer.ckpt_path", "last")
    assert "actor/loss" not in whole[0]
    assert resumed[1]["actor/loss"] == whole[1]["actor/loss"]
    assert resumed[1]["actor/grad_norm"] == whole[1]["actor/grad_norm"] > 0
    assert weights == {p.name: p.read_bytes() for p in (tmp_path / "runs/own/model").glob("*.safetensors")}
    assert weights
