"""Resident memory of one of two ranks while a model is loaded, trained, synced, saved and resumed, divided or not.

    python benchmarks/large_models.py                    every way, a model of about 460 MB in float32
    python benchmarks/large_models.py --ways zero3 fsdp

Two ranks train, a third one has the engine. For each phase stands the growth of the busiest training rank's peak
resident memory (`VmHWM`, mapped files included) over what was resident before the model was built, when a tiny model
had been through all phases; and this growth divided by that of ZeRO-0, which divides nothing. Buckets are as large as
a layer. Wanted is at most 0.62 at ZeRO-3 and with FSDP2. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from lightning.fabric import Fabric

from benchmarks.exchange_memory import kilobytes, reset_peak
from rlflow import CausalLM, Optimizer, checkpoint
from rlflow.controller.weight_sync import WeightSync, sending_group
from rlflow.dag.tasks import SyncWeights
from rlflow.databuffer.transport import Transport
from rlflow.models.tiny import write_tiny_model
from rlflow.rollout import RankInfo, TransformersEngine
from rlflow.storage.disk import Disk
from rlflow.storage.draft import Draft
from rlflow.strategies import DeepSpeedStrategy, FSDPStrategy, TrainingStrategy
from rlflow.types import Ragged
from rlflow.values.batch import TokenRows
from rlflow.values.layout import Layout

ROLE = "actor"
JOBS = ("load", "train", "resume")  # each in processes of its own
TRAINS, ENGINE = (0, 1), 2
SIZES = {"hidden_size": 512, "intermediate_size": 1408, "layers": 36, "heads": 8, "kv_heads": 8}
TINY = {"hidden_size": 128, "intermediate_size": 192, "layers": 2}
LAYER = 4 * 512**2 + 3 * 512 * 1408  # elements of the largest layer
ROWS, TOKENS = 2, 32
WANTED = 0.62
# What is freed goes back to the system at once, or the peak would be of what glibc keeps for the next use.
FREED = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


@dataclass(frozen=True)
class Way:
    """A strategy, made anew in every process."""

    make: Callable[[], TrainingStrategy]
    divided: bool = False


WAYS = {
    "zero0": Way(lambda: DeepSpeedStrategy(0, reduce_bucket_size=LAYER)),
    "zero2": Way(lambda: DeepSpeedStrategy(2, reduce_bucket_size=LAYER)),
    "zero3": Way(lambda: DeepSpeedStrategy(3, reduce_bucket_size=LAYER), divided=True),
    "fsdp": Way(lambda: FSDPStrategy(), divided=True),
}


def main() -> None:
    """Measure each way and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    options = parser.parse_args()
    ways = list(dict.fromkeys(["zero0", *options.ways]))
    table: dict[str, dict[str, float]] = {}
    os.environ |= FREED
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = write_tiny_model(folder / "model", **SIZES)  # type: ignore[arg-type]
        tiny = write_tiny_model(folder / "tiny", **TINY)  # type: ignore[arg-type]
        size = (model / "model.safetensors").stat().st_size / 1e6
        for way in ways:
            table[way] = {}
            for job in JOBS:
                run = folder / way
                arguments = (way, job, str(model), str(tiny), str(run))
                torch.multiprocessing.spawn(_rank, arguments, nprocs=3)
                for rank in TRAINS:
                    found = json.loads((run / f"found-{job}-{rank}.json").read_text())
                    for phase, grown in found.items():
                        table[way][phase] = max(table[way].get(phase, 0.0), grown)
            ratios = {phase: grown / table["zero0"][phase] for phase, grown in table[way].items()}
            cells = ", ".join(f"{phase} {grown:.0f} MB ({ratios[phase]:.2f})" for phase, grown in table[way].items())
            print(f"{way}: {cells}", flush=True)
    ratio = {way: {phase: grown / table["zero0"][phase] for phase, grown in of.items()} for way, of in table.items()}
    worst = {way: max(ratio[way].values()) for way in ways if WAYS[way].divided}
    print(
        json.dumps(
            {
                "benchmark": "large_models",
                "model_mb": round(size),
                "grown_mb": table,
                "ratio": ratio,
                "worst": worst,
                "wanted": WANTED,
            }
        )
    )


def _rank(rank: int, way: str, job: str, model: str, tiny: str, run: str) -> None:
    torch.set_num_threads(1)
    Path(run).mkdir(parents=True, exist_ok=True)
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE="3")
    dist.init_process_group("gloo", init_method=f"file://{run}/store-{job}", rank=rank, world_size=3)
    strategy = WAYS[way].make()
    Fabric(accelerator="cpu", devices=3, strategy=strategy.processes).launch()
    strategy.form_groups({ROLE: Layout(TRAINS, len(TRAINS)), "warm": Layout(TRAINS, len(TRAINS))})
    transport = Transport("cpu")
    for name, path in (("warm", tiny), (ROLE, model)):
        _all_phases(_Phases(name == ROLE), strategy, transport, name, Path(path), Path(run) / name, job)
    dist.barrier()
    dist.destroy_process_group()


class _Phases:
    """Growth of the peak of resident memory by phase, MB."""

    def __init__(self, measures: bool) -> None:
        self.measures = measures
        gc.collect()
        self.before = kilobytes("VmRSS")
        self.grown: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        gc.collect()
        reset_peak()
        began = time.monotonic()
        yield
        self.grown[name] = (kilobytes("VmHWM") - self.before) / 1024
        if self.measures and dist.get_rank() == 0:
            print(f"    {name}: {self.grown[name]:.0f} MB, {time.monotonic() - began:.1f} s", flush=True)


def _all_phases(
    phases: _Phases,
    strategy: TrainingStrategy,
    transport: Transport,
    name: str,
    path: Path,
    run: Path,
    job: str,
) -> None:
    rank = transport.rank
    trains = rank in TRAINS
    handle = CausalLM(str(path), job != "load", Optimizer(lr=1e-4) if job != "load" else None)
    if trains:
        with phases.phase("loading" if job == "load" else "setup"):
            strategy.setup_role(name, handle, path)
    if job == "resume":
        found = checkpoint.find("last", run)
        with phases.phase("resuming"):
            checkpoint.restore(found, strategy, [name])
    elif job == "train":
        if trains:
            with phases.phase("step"):
                for _ in range(2):
                    _update(strategy, name, handle, rank)
        task = SyncWeights(name, TRAINS, (ENGINE,))
        transport.form_groups([sending_group(task)])
        engine = _engine(path) if rank == ENGINE else None
        with phases.phase("sync"):
            WeightSync(task, strategy, engine, transport, 4 * LAYER).run(1)
        with phases.phase("saving"):
            _save(strategy, name, run, rank)
    if phases.measures and trains:
        (run.parent / f"found-{job}-{rank}.json").write_text(json.dumps(phases.grown))


def _update(strategy: TrainingStrategy, name: str, handle: CausalLM, rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    prompts = Ragged.from_lists(torch.randint(32, 120, (ROWS, TOKENS), generator=generator).tolist())
    responses = torch.randint(32, 120, (ROWS, TOKENS), generator=generator)
    rows: Any = TokenRows(prompts, responses, torch.full((ROWS,), TOKENS))
    with handle.training():
        loss = -handle.logprobs(rows).sum() / (ROWS * TOKENS * len(TRAINS))
    strategy.backward(name, loss, last=True)
    strategy.step(name)


def _save(strategy: TrainingStrategy, name: str, run: Path, rank: int) -> None:
    """The model, then a checkpoint."""
    draft = Draft(checkpoint.folder_of(run / "checkpoint", 2), rank, dict.fromkeys(range(3), "here"), 300)
    if rank == 0:
        (run / "model").mkdir(parents=True)
        draft.open()
    strategy.barrier()
    with Disk() as disk:
        if strategy.holds(name):
            strategy.save(name, run / "model", disk)
        disk.wait()
        checkpoint.write_share(draft, disk, strategy, [name])
        checkpoint.leave(draft, disk)
        if rank == 0:
            progress = checkpoint.Progress(2, 0, "rows")
            checkpoint.complete(draft, disk, [name], progress, checkpoint.Retention(2))
    strategy.barrier()


def _engine(path: Path) -> TransformersEngine:
    engine = TransformersEngine()
    engine.setup(str(path), RankInfo(torch.float32, torch.device("cpu")))
    return engine


if __name__ == "__main__":
    main()
