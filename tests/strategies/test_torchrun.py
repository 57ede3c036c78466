"""Two agents of torchrun on one machine, which stand for two nodes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from rlflow.models.tiny import write_tiny_model
from tests.own_folder import command
from tests.ranks import RankPool
from tests.saved import load_model

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of GRPO with a tiny model, on data in a file."""
    folder = tmp_path_factory.mktemp("torchrun")
    model = write_tiny_model(folder / "policy", hidden_size=64, intermediate_size=96, layers=1, max_position=256)
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps({"question": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(6)))
    written = {
        "seed": 3,
        "module": {
            "class_path": "rlflow.algorithms.GRPO",
            "init_args": {
                "actor": {"model": str(model), "optimizer": {"lr": 3e-3}},
                "group_size": 4,
                "max_response_length": 8,
                "reward": {"class_path": "tests.controller.runs.OddCharacters"},
            },
        },
        "data": {"train": {"class_path": "rlflow.data.JSONL", "init_args": {"path": str(data)}}, "prompts_per_step": 3},
        "trainer": {"accelerator": "cpu", "max_steps": 2},
        "strategy": {"class_path": "rlflow.strategies.DeepSpeedStrategy", "init_args": {"stage": 2}},
        "rollout": {"class_path": "rlflow.rollout.TransformersEngine"},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(written))
    return path


def start(arguments: list[str]) -> subprocess.Popen[str]:
    """A command line in an environment that knows nothing of ranks yet."""
    set_by_launchers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {key: value for key, value in os.environ.items() if key not in set_by_launchers}
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        arguments,
        cwd=root,
        env=environment | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(processes: list[subprocess.Popen[str]]) -> None:
    """Wait for all of them; none may fail."""
    try:
        said = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(said)


def test_two_agents_of_torchrun_train_as_two_devices_do(config: Path, tmp_path: Path, ranks2: RankPool) -> None:
    def given(name: str, devices: int, nodes: int) -> list[str]:
        settings = {"run_dir": str(tmp_path / name), "devices": str(devices), "num_nodes": str(nodes)}
        options = [part for key, value in settings.items() for part in (f"--trainer.{key}", value)]
        return ["--config", str(config), *options]

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    agent = [*TORCHRUN, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1"]
    fit = [*agent, "-m", "rlflow.cli", "fit", *given("torchrun", devices=1, nodes=2)]
    finish([start(fit) for _ in range(2)])
    ranks2.run(command, tmp_path, "fit", *given("fabric", devices=2, nodes=1), timeout_s=300)

    before = load_file(config.parent / "policy/model.safetensors")
    found, expected = (load_model(tmp_path / name / "model") for name in ("torchrun", "fabric"))
    assert found.keys() == expected.keys()
    assert all(bool((found[name] == expected[name]).all()) for name in expected)
    assert any(bool((found[name] != before[name]).any()) for name in expected if name in before)
