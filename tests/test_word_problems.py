"""Prompts of hundreds of tokens through the commands that a user gives: the chat template, vLLM, two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.word_problems import FOLDER, LONGEST, SHORTEST, check
from rlflow.data import JSONL, PromptData
from rlflow.data.prompts import Encoder
from rlflow.data.scan import count, scan
from rlflow.models.tiny import tiny_tokenizer

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 300
STEPS = 5
PREFILL_BUDGET = 1024  # tokens; the 8 prompts of a rank have about 1,800, and 8 responses each


def run(folder: Path, *command: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("LOCAL_RANK", "MASTER_PORT")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder to which the problems were written."""
    folder = tmp_path_factory.mktemp("own")
    run(folder, str(ROOT / "benchmarks/word_problems.py"), "write")
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """There, after a few steps of the config."""
    changes = [f"--trainer.max_steps={STEPS}", "--data.prompts_per_step=16"]
    changes += [f"--rollout.init_args.max_num_batched_tokens={PREFILL_BUDGET}"]
    config = str(ROOT / "configs/grpo_word_problems.yaml")
    run(folder, "-m", "rlflow.cli", "fit", "--config", config, *changes)
    return folder


def test_the_prompts_have_the_lengths_of_real_ones(folder: Path) -> None:
    source = JSONL(str(folder / FOLDER / "problems.jsonl"))
    data = PromptData(source, chat_template=True, max_prompt_length=LONGEST).resolved()
    encode = Encoder(data, tiny_tokenizer())
    found = scan(source, data, count(source, encode, range(len(source))).numbers)
    lengths = sorted(len(example.prompt_ids) for example in encode(source, range(len(source))))
    assert len(found.kept) == 200
    assert lengths[0] >= SHORTEST
    assert found.longest_prompt == lengths[-1] > LONGEST - 50


@pytest.mark.slow
def test_vllm_agrees_with_training_at_each_step_and_the_reward_rises(trained: Path) -> None:
    assert check(trained / FOLDER / "grpo" / "metrics.jsonl")["steps"] == STEPS
