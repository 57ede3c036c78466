"""`pytest` in this folder runs these."""

import json
from pathlib import Path

from algorithm import MyGRPO
from rewards import exact

from rlflow import Trainer


def test_the_reward_is_one_for_the_answer_alone() -> None:
    assert [exact(" 5", "5"), exact("4", "5"), exact("five", "5")] == [1.0, 0.2, 0.0]


def test_a_step_is_logged_and_leaves_a_model(tmp_path: Path) -> None:
    module = MyGRPO("tiny", reward=exact, group_size=4, max_response_length=4)
    Trainer(str(tmp_path / "run"), max_steps=1, accelerator="cpu").fit(module, "data.jsonl")
    assert (tmp_path / "run" / "model" / "config.json").exists()
    assert 0 <= json.loads((tmp_path / "run" / "metrics.jsonl").read_text())["reward/mean"] <= 1
