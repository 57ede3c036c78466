"""Memory that runs out ends a run in one line: rank, node, role, what was in use, and what would help."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.cli import main
from rlflow.errors import UserError
from rlflow.memory.out_of_memory import is_out_of_memory, memory_watched, to_generate, to_load, to_train
from rlflow.models.causal_lm import CausalLM
from rlflow.rollout import EngineProcessError
from rlflow.rollout.engine_subprocess import EngineSubprocess
from rlflow.rollout.transformers import TransformersEngine
from rlflow.rollout.vllm import VLLMEngine
from rlflow.strategies.deepspeed import DeepSpeedStrategy
from rlflow.strategies.single import SingleProcess
from tests.own_folder import forgotten, make, write

GREEDY = """
import torch

from rlflow import PerSample, PerToken, Rollout, node
from rlflow.algorithms import GRPO


class Greedy(GRPO):
    @node
    def rewards(self, rollout: Rollout) -> PerSample:
        return torch.empty(10**13, dtype=torch.float32)[: len(rollout.lengths)]


class GreedyLoss(GRPO):
    @node(role="actor", type="train")
    def actor_loss(self, rollout: Rollout) -> PerToken:
        return torch.empty(10**13, dtype=torch.float32)[: len(rollout.lengths)]


class Listing(GRPO):
    @node
    def rewards(self, rollout: Rollout) -> PerSample:
        return torch.tensor([0.0] * 10**15)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    make(tmp_path)
    (tmp_path / "greedy.py").write_text(GREEDY)
    monkeypatch.chdir(tmp_path)
    with forgotten(tmp_path):
        yield tmp_path


def last_line(capfd: pytest.CaptureFixture[str], changes: dict[str, Any], code: int = 2) -> str:
    """The last line of the command."""
    write(Path("my.yaml"), changes)
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", "my.yaml"])
    errors = capfd.readouterr().err
    assert ended.value.code == code, errors
    (line,) = (line for line in errors.splitlines() if "rlflow: error" in line)
    assert "Traceback" not in errors
    return line


@pytest.mark.parametrize(("name", "line"), [("Greedy", 11), ("Listing", 23)])
def test_a_node_that_asks_for_too_much_is_named_with_its_line(
    name: str, line: int, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = last_line(capfd, {"module.class_path": f"greedy.{name}"})
    assert said.startswith("rlflow: error: rank 0 on ")
    assert f"ran out of memory: step 1, node `rewards`, greedy.py:{line} (" in said
    assert " of the machine's " in said
    assert said.endswith(
        "To take less: lower `data.prompts_per_step` or `module.init_args.group_size`; make fewer of them at a time in"
        " a node of your own"
    )


LIMITED = """
import resource, sys
from rlflow.cli import main
from rlflow.callbacks.callback import Callback
import rlflow.run.fit, rlflow.trainer  # noqa


class Limit(Callback):
    def on_task_start(self, trainer, module, task, step):
        if task.startswith("train"):
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + 64 * 2**20,) * 2)


if __name__ == "__main__":
    main(["fit", "--config", "my.yaml"])
"""


def test_a_train_node_that_asks_for_too_much_is_named_with_its_role_and_its_settings(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = last_line(capfd, {"module.class_path": "greedy.GreedyLoss", "strategy.init_args": {"token_budget": 65536}})
    assert "ran out of memory: step 1, node `actor_loss` of role `actor`, greedy.py:17 (" in said
    lower = "lower `strategy.init_args.token_budget` (65536); set `module.init_args.actor.gradient_checkpointing`"
    assert lower in said


@pytest.mark.slow
def test_a_backward_pass_that_runs_out_names_the_role_and_its_settings(folder: Path) -> None:
    (folder / "limited.py").write_text(LIMITED)
    rows = "".join(f'{{"question": "{"1+" * 100}1=", "answer": "{number}"}}\n' for number in range(64))
    (folder / "rows.jsonl").write_text(rows)
    write(
        folder / "my.yaml",
        {
            "callbacks": [{"class_path": "limited.Limit"}],
            "data.prompts_per_step": 32,
            "strategy.init_args": {"token_budget": 65536, "share_prefixes": False},
        },
    )
    ran = subprocess.run(
        [sys.executable, "limited.py"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 2, ran.stderr
    (said,) = (line for line in ran.stderr.splitlines() if line.startswith("rlflow: error: "))
    assert "ran out of memory: step 1, node `actor_loss` of role `actor` (" in said
    lower = "lower `strategy.init_args.token_budget` (65536); set `module.init_args.actor.gradient_checkpointing`"
    assert lower in said


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
        ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"),
        ValueError(
            "Free memory on device cuda:0 (1.0/80.0 GiB) on startup is less than desired GPU memory utilization (0.9)"
        ),
        ValueError("4.0 GiB KV cache is needed, which is larger than the available KV cache memory (1.0 GiB)"),
        ValueError("Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single token."),
        EngineProcessError("the engine of rank 2 could not generate: OutOfMemoryError: CUDA out of memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_out_of_memory_errors_of_libraries_are_recognised(error: Exception) -> None:
    assert is_out_of_memory(error)


def test_other_errors_stay_as_they_are() -> None:
    strategy = SingleProcess()
    with pytest.raises(RuntimeError, match=r"^shapes differ$"), memory_watched("step 1", list, strategy):
        raise RuntimeError("shapes differ")
    with pytest.raises(UserError, match=r"^one line$"), memory_watched("step 1", list, strategy):
        raise UserError("one line")


def test_settings_that_are_as_they_should_be_are_not_named() -> None:
    strategy = DeepSpeedStrategy(stage=3, offload_optimizer=True)
    checkpointed = CausalLM("tiny", gradient_checkpointing=True)
    strategy.processes.parallel_devices = [torch.device("cpu")]
    assert to_train(strategy, checkpointed) == ["lower `strategy.init_args.token_budget` (4096)"]


def test_advice_for_a_failed_load_does_not_name_smaller_batches() -> None:
    strategy = DeepSpeedStrategy(stage=1, precision="bf16")
    strategy.processes.parallel_devices = [torch.device("cpu")]
    assert to_load(strategy) == [
        "raise `strategy.init_args.stage` (1) to 3",
        "take a smaller model, or train adapters (`lora`)",
        "place roles on ranks of their own (`placement`)",
    ]


def test_an_engine_s_own_settings_are_named() -> None:
    strategy = SingleProcess()
    strategy.processes.parallel_devices = [torch.device("cpu")]
    assert to_generate(strategy, TransformersEngine(max_batch=7)) == ["lower `rollout.init_args.max_batch` (7)"]
    assert "`rollout.init_args.kv_cache_gib`" in to_generate(strategy, VLLMEngine())[0]
    beside = EngineSubprocess(TransformersEngine(max_batch=7), index=0, size=1, address="", timeout_s=120.0)
    assert to_generate(strategy, beside) == ["lower `rollout.init_args.max_batch` (7)"]
    strategy.processes.parallel_devices = [torch.device("cuda")]
    assert "`rollout.init_args.gpu_memory_utilization`" in to_generate(strategy, VLLMEngine())[0]
