"""The memory of a rank is printed before the first step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from rlflow.commands.fit import read_fit
from rlflow.memory.estimate import memories
from rlflow.run.prepare import prepare
from rlflow.run.tables import device_memory, run_workload
from tests.own_folder import forgotten, make, write


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's own."""
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    with forgotten(tmp_path):
        yield tmp_path


def printed(folder: Path, changes: dict[str, object], capfd: pytest.CaptureFixture[str]) -> list[str]:
    """The output of a run of one step."""
    write(folder / "my.yaml", {"trainer.max_steps": 1, **changes})
    read_fit(["--config", "my.yaml"]).fit()
    return capfd.readouterr().out.splitlines()


def test_memory_is_printed_before_the_first_step(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = printed(folder, {}, capfd)
    place = next(place for place, line in enumerate(lines) if line.startswith("memory of a rank: "))
    assert place < next(place for place, line in enumerate(lines) if line.startswith("step 1/1"))
    # 410,752 parameters in float32 on one process: gradients as large, and Adam's two.
    assert lines[place + 1].split(maxsplit=1)[1].startswith("weights 1.6 MB, gradients 1.6 MB, optimizer 3.3 MB, ")
    assert " ".join(lines[place + 3].split()).startswith("engine weights 1.6 MB, cache ")
    assert not any(line.startswith("warning") for line in lines)


def test_activations_are_those_of_the_longest_row_of_data_without_a_limit(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sft = {"module.class_path": "rlflow.algorithms.SFT", "module.init_args": {"actor": {"model": "tiny"}}}
    (folder / "rows.jsonl").write_text(json.dumps({"question": "1+1=", "answer": "2" * 300}))
    data = {"data.prompts_per_step": 1, "data.response": "answer"}
    lines = printed(folder, {**sft, **data, "strategy.init_args.token_budget": 8}, capfd)
    # 301 tokens after a prompt of up to 512, in 2 layers of float32: 24 bytes for each of 128 numbers, 8 for each of
    # queries and keys (64), and 16 within the feed-forward network of 384; a backward pass adds 8 of these and 4 of 128
    layer, gradients = 24 * 128 + 8 * (128 + 64) + 16 * 384, 8 * 384 + 4 * 128
    (line,) = (line for line in lines if "activations" in line)
    assert line.endswith(f"activations {813 * (2 * layer + gradients) / 1e6:.1f} MB")


def test_a_run_that_may_not_fit_is_warned_of_and_begins(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = printed(folder, {"strategy.init_args.token_budget": 2**31}, capfd)  # 37 TB of activations
    (short,) = (line for line in lines if line.startswith("  ! rank 0 is out of memory by "))
    assert "while training" in short
    assert any(line.startswith("warning: by these figures the run does not fit") for line in lines)
    assert any(line.startswith("step 1/1") for line in lines)


@pytest.mark.parametrize(
    ("engine", "settings"), [("TransformersEngine", {"max_batch": 3}), ("VLLMEngine", {"kv_cache_gib": 0.25})]
)
def test_what_is_printed_is_what_is_predicted(engine: str, settings: dict[str, object], folder: Path) -> None:
    write(folder / "my.yaml", {"rollout": {"class_path": f"rlflow.rollout.{engine}", "init_args": settings}})
    configured = read_fit(["--config", "my.yaml", "--predict"])
    module, data, trainer = configured.module, configured.data, configured.trainer
    assert configured.simulation is not None
    assert trainer.strategy is not None
    trainer.strategy.processes.parallel_devices = [torch.device("cpu")]  # type: ignore[attr-defined]
    prepared = prepare(
        module,
        data,
        trainer.settings,
        trainer.strategy,
        trainer.engine_settings,
        folder,
    )
    here = run_workload(prepared)
    total, _ = device_memory(torch.device("cpu"), ranks_here=1)
    assert memories(here, total) == configured.simulation.predicted.memories


def test_ranks_of_a_machine_share_its_memory() -> None:
    total, free = device_memory(torch.device("cpu"), ranks_here=4)
    assert total == psutil.virtual_memory().total / 4
    assert 0 < free < total
