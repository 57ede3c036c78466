"""Two agents of torchrun, which stand for two nodes: on one machine, and on two hosts that a wire connects."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from rlflow.models.tiny import write_tiny_model
from tests.checkpoint_files import load_model
from tests.own_folder import command
from tests.ranks import RankPool

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


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    """Two hosts of this machine, by name, with their addresses: each has a network of its own, joined by `wire`."""
    addresses = {"rlflow-a": "10.199.0.1", "rlflow-b": "10.199.0.2"}
    first, second = addresses

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        for name in addresses:
            ip("netns", "add", name)
        ip("link", "add", "wire", "netns", first, "type", "veth", "peer", "name", "wire", "netns", second)
        for name, address in addresses.items():
            ip("-n", name, "address", "add", f"{address}/24", "dev", "wire")
            for device in ("wire", "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield addresses
    finally:
        for name in addresses:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def start(arguments: list[str], **variables: str) -> subprocess.Popen[str]:
    """A command line in an environment that knows nothing of ranks yet, but has these variables."""
    set_by_launchers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {key: value for key, value in os.environ.items() if key not in set_by_launchers}
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        arguments,
        cwd=root,
        env=environment | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(processes: list[subprocess.Popen[str]]) -> None:
    """Wait for all of them; none may fail."""
    try:
        said = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(said)


def given(config: Path, folder: Path, devices: int, nodes: int) -> list[str]:
    settings = {"run_dir": str(folder), "devices": str(devices), "num_nodes": str(nodes)}
    return ["--config", str(config), *(part for key, value in settings.items() for part in (f"--trainer.{key}", value))]


def agent(config: Path, folder: Path, address: str, endpoint: str, *options: str) -> list[str]:
    """torchrun's command of the node at `address`, in a run of two nodes that meet at `endpoint`."""
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--local-addr", address]
    return [*TORCHRUN, *meet, *options, "-m", "rlflow.cli", "fit", *given(config, folder, devices=1, nodes=2)]


def require_same_training(config: Path, folder: Path, other: Path) -> None:
    before = load_file(config.parent / "policy/model.safetensors")
    found, expected = (load_model(run / "model") for run in (folder, other))
    assert found.keys() == expected.keys()
    assert all(bool((found[name] == expected[name]).all()) for name in expected)
    assert any(bool((found[name] != before[name]).any()) for name in expected if name in before)


def of_a_node(folder: Path, *arguments: str) -> None:
    """A command of this rank, which has a node of its own, in the variables that torchrun sets there."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ["RANK"]}.items():
            patched.setenv(name, value)
        command(folder, *arguments)


def test_two_ranks_on_nodes_of_their_own_train_as_two_devices_do(
    config: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    ranks2.run(of_a_node, tmp_path, "fit", *given(config, tmp_path / "nodes", devices=1, nodes=2))
    ranks2.run(command, tmp_path, "fit", *given(config, tmp_path / "fabric", devices=2, nodes=1))
    require_same_training(config, tmp_path / "nodes", tmp_path / "fabric")


@pytest.mark.slow
def test_two_agents_of_torchrun_train_as_two_devices_do(config: Path, tmp_path: Path, ranks2: RankPool) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    finish([start(agent(config, tmp_path / "torchrun", "127.0.0.1", endpoint)) for _ in range(2)])
    ranks2.run(command, tmp_path, "fit", *given(config, tmp_path / "fabric", devices=2, nodes=1), timeout_s=300)
    require_same_training(config, tmp_path / "torchrun", tmp_path / "fabric")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2")
def test_two_hosts_of_torchrun_train_as_two_devices_do(
    config: Path, tmp_path: Path, ranks2: RankPool, hosts: dict[str, str]
) -> None:
    first = hosts["rlflow-a"]
    started = []
    for name, address in hosts.items():
        # torchrun knows itself by its hostname, which both hosts share.
        serves = "--rdzv-conf", f"is_host={address == first}"
        of_host = agent(config, tmp_path / "hosts", address, f"{first}:29511", *serves)
        started.append(start(["ip", "netns", "exec", name, *of_host], GLOO_SOCKET_IFNAME="wire"))
    finish(started)
    ranks2.run(command, tmp_path, "fit", *given(config, tmp_path / "fabric", devices=2, nodes=1), timeout_s=300)
    require_same_training(config, tmp_path / "hosts", tmp_path / "fabric")
