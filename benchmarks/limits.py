"""The largest models that each machine of `rlflow simulate` trains, for `docs/limits.md`.

    python benchmarks/limits.py

GRPO as in `configs/grpo_math_16nodes.yaml`, with an engine of 8 GPUs: a dense model has layers like those of
Qwen2.5-72B, a mixture of experts layers like those of Qwen3-235B-A22B, as many as fit. A model fits where every rank
holds it while it is loaded, generates, is trained, is saved and resumed. Nothing of it is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from rlflow.commands.simulate import read_simulate
from rlflow.memory.estimate import memories
from rlflow.memory.workload import Workload
from rlflow.models.sizes import KNOWN, ModelSize
from rlflow.simulate.hardware import PRESETS, Hardware
from rlflow.simulate.simulation import run_phases

CONFIG = Path(__file__).parents[1] / "configs" / "grpo_math_16nodes.yaml"
NODES = (1, 4, 16)
BUFFER = 256 * 2**20  # of `trainer.sync_bucket_bytes`
SHAPES = {
    "dense": replace(KNOWN["Qwen/Qwen2.5-72B"], layers=1),
    "sparse": replace(KNOWN["Qwen/Qwen3-235B-A22B"], layers=1),
}
WAYS = ("ZeRO-2", "ZeRO-3", "FSDP2")


def main() -> None:
    """Print the page's table."""
    print("\n".join(table()))


def table() -> Iterator[str]:
    """The lines of the table in Markdown: thousand millions of parameters, of sparse ones all and those of a token."""
    yield "| Machine | Nodes of 8 | " + " | ".join(f"{shape}, {way}" for shape in SHAPES for way in WAYS) + " |"
    yield "|---" * (2 + len(SHAPES) * len(WAYS)) + "|"
    for name, machine in PRESETS.items():
        for nodes in NODES:
            found = (largest(machine, nodes, shape, way) for shape in SHAPES for way in WAYS)
            yield f"| {name} | {nodes} | " + " | ".join(map(_told, found)) + " |"


def largest(machine: Hardware, nodes: int, shape: str, way: str) -> ModelSize | None:
    """The model of the most layers that fits; None where one layer does not."""
    fits, too_many = 0, 1
    while _fits(machine, nodes, replace(SHAPES[shape], layers=too_many), way):
        fits, too_many = too_many, 2 * too_many
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (
            (middle, too_many) if _fits(machine, nodes, replace(SHAPES[shape], layers=middle), way) else (fits, middle)
        )
    return replace(SHAPES[shape], layers=fits) if fits else None


def _fits(machine: Hardware, nodes: int, size: ModelSize, way: str) -> bool:
    workload = _with(_workload(nodes), size, way)
    found = memories(workload, machine.memory)
    return found[0].fits and all(
        phase.memory <= machine.memory for phase in run_phases(workload, found, machine, BUFFER)
    )


def _with(workload: Workload, size: ModelSize, way: str) -> Workload:
    """The step with another model, trained another way."""
    actor = replace(workload.roles["actor"], size=size, trained=size.parameters)
    if way == "FSDP2":
        actor = replace(actor, stage=3, moments=2, masters=True, reduce_bucket_size=0)
    else:
        actor = replace(actor, stage=int(way[-1]), moments=3, reduce_bucket_size=min(50_000_000, size.largest_layer))
    engine = workload.engines["actor"]
    engine = replace(engine, weights=size.parameters * actor.width / engine.ranks)
    return replace(workload, roles={"actor": actor}, engines={"actor": engine})


@cache
def _workload(nodes: int) -> Workload:
    options = ["--module.actor.model=Qwen/Qwen2.5-72B", "--rollout.tensor_parallel_size=8", f"--nodes={nodes}"]
    return read_simulate(["--config", str(CONFIG), *options]).predicted.workload


def _told(size: ModelSize | None) -> str:
    if size is None:
        return "none"
    total = f"{size.parameters / 1e9:.0f}"
    return f"{total} ({size.active / 1e9:.0f})" if size.experts else total


if __name__ == "__main__":
    main()
