"""README's smallest run: a function as the reward, a dataset from a file of three lines, in an empty folder."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import runpy
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SECTION = "## The smallest run\n"


def blocks() -> list[str]:
    """The code of the section, in order."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").split(SECTION)[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def run(code: str, folder: Path) -> None:
    """Python in a folder, without this checkout in its path."""
    (folder / "first.py").write_text(code, encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "first.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=900
    )
    assert ran.returncode == 0, ran.stderr


def rewards(folder: Path) -> list[float]:
    """The mean reward of each step."""
    lines = (folder / "runs" / "first" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [step["reward/mean"] for step in map(json.loads, lines) if "reward/mean" in step]


def test_the_smallest_run_trains_in_an_empty_folder(tmp_path: Path) -> None:
    dataset, training = blocks()
    assert len(dataset.split("\n")) - dataset.count("\n\n") - 1 == 3  # without blank lines
    assert training.count("max_steps=20") == 1
    for name, code in (("dataset.py", dataset), ("first.py", training.replace("max_steps=20", "max_steps=3"))):
        (tmp_path / name).write_text(code, encoding="utf-8")
        with contextlib.chdir(tmp_path):
            runpy.run_path(name, run_name="__main__")
    assert len(rewards(tmp_path)) == 3
    assert (tmp_path / "runs" / "first" / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_from_a_model_that_adds_a_little_its_reward_rises(tmp_path: Path) -> None:
    """Of 60 steps the last ten are above the first ten by two standard errors of the difference."""
    dataset, training = blocks()
    run(dataset, tmp_path)
    command = [sys.executable, "-m", "rlflow.cli", "fit", "--config", str(ROOT / "configs/quickstart_sft.yaml")]
    subprocess.run([*command, "--trainer.run_dir", "sft"], cwd=tmp_path, check=True, timeout=900)
    model = 'CausalLM("sft/model", optimizer=Optimizer(lr=1e-4))'
    larger = training.replace('"tiny"', model).replace("max_steps=20", "max_steps=60")
    run(f"from rlflow import CausalLM, Optimizer\n{larger}", tmp_path)
    found = rewards(tmp_path)
    first, last = found[:10], found[-10:]
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / 10)
    assert statistics.mean(last) > statistics.mean(first) + 2 * error
