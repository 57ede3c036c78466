"""Measure the machine at hand for `rlflow simulate --hardware machine.yaml`.

    python benchmarks/calibrate.py --to machine.yaml [--config configs/quickstart_grpo.yaml] [--set module.actor=...]

Bare operations, in as many processes at once as there will be ranks: a product of matrices, a copy, forward and
backward passes of a small model, an all-to-all, a tiny gather, an exchange of the databuffer. Then the config with ONE
rank, at its own number of prompts, a half and an eighth of it, for a few steps: their seconds by node give rates and
fixed costs. The rate of forward passes is known from a step that has one and training: of the quickstart with `--set
module.anchor=old`. No run of more than one rank is looked at, so what `benchmarks/predicted.py` compares at 2 and 4 is
a prediction. Medians all along.

Processes slow each other down by what a pass costs of the CPU while the others run, in turns with one alone, times
processes over cores where there are more; so that does not depend on who else uses the machine. The rest does: keep it
quiet.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from rlflow.commands.simulate import read_simulate
from rlflow.databuffer.buffer import DataBuffer
from rlflow.databuffer.rows import RowSpace
from rlflow.databuffer.transport import Transport
from rlflow.loggers.jsonl import read_metrics
from rlflow.module import handles
from rlflow.process.freed_memory import keep_freed_memory
from rlflow.simulate.calibration import STEP, Measured, as_yaml, calibrated
from rlflow.simulate.hardware import Hardware
from rlflow.values.layout import Layout
from rlflow.values.ragged import Ragged

ROWS = 1024  # of an exchange, on each rank
EXCHANGED = 16 * 2**20  # bytes that each rank sends
LAPS = 15
STEPS = 6  # of a run; the first is not counted


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart_grpo.yaml")
    parser.add_argument("--to", type=Path, required=True, help="a YAML file")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="that will share the machine")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="options of the config")
    given = parser.parse_args()
    bare, sharing = measured_bare(given.ranks)
    print("sharing:", {ranks: round(factor, 3) for ranks, factor in sharing.items()}, flush=True)
    options = [f"--{option}" for option in given.set]
    steps = [measured_step(given.config, options, part, bare) for part in (1, 2, 8)]
    for step in steps:
        print({name: round(seconds, 4) for name, seconds in step.measured[1].items()}, flush=True)
    machine = calibrated(bare, [step.measured for step in steps])
    given.to.parent.mkdir(parents=True, exist_ok=True)
    lengths = "".join(f"# {name}: {value:.3f}\n" for name, value in steps[0].lengths.items())
    given.to.write_text(lengths + as_yaml(machine, sharing))
    print(given.to.read_text(), end="")


def measured_bare(counts: Sequence[int]) -> tuple[Hardware, dict[int, float]]:
    """A machine without fixed costs, and how much slower processes compute side by side."""
    most = max(counts)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (most, sorted({1, *counts}), folder), nprocs=most)
        told = json.loads((Path(folder) / "told.json").read_text())
    sharing = {int(ranks): factor for ranks, factor in told.pop("sharing").items()}
    fixed = dict.fromkeys(("decode_overhead", "message_seconds"), 0.0)
    efficiencies = ("train_efficiency", "forward_efficiency", "memory_efficiency", "link_efficiency")
    memory = float(psutil.virtual_memory().total) / most
    return Hardware(memory=memory, gpus_per_node=most, **told, **fixed, **dict.fromkeys(efficiencies, 1.0)), sharing


def _rank(rank: int, most: int, counts: Sequence[int], folder: str) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=most)
    pair = dist.new_group([0, 1]) if most > 1 else None
    told: dict[str, Any] = {"sharing": _sharing(rank, counts)}
    if rank == 0:
        side, whole = torch.randn(1024, 1024), torch.empty(2**24)  # 64 MB
        told["peak_flops"] = 2 * 1024**3 / _seconds(lambda: side @ side)
        told["memory_bandwidth"] = 2 * whole.nbytes / _seconds(whole.clone)
    told |= dict.fromkeys(("node_bandwidth", "network_bandwidth"), 1e9)
    if rank < 2 and pair is not None:
        message, small = torch.zeros(EXCHANGED, dtype=torch.uint8), torch.zeros(1)
        received = torch.empty_like(message)
        seconds = _seconds(lambda: dist.all_to_all_single(received, message, group=pair), pair)
        latency = _seconds(lambda: dist.all_reduce(small, group=pair), pair)
        told |= dict.fromkeys(("node_bandwidth", "network_bandwidth"), EXCHANGED / 2 / seconds)
        told |= dict.fromkeys(("node_latency", "network_latency"), latency)
        told["exchange_row_seconds"] = max(_seconds(_exchange(pair), pair) - latency, 0.0) / ROWS
    if rank == 0:
        (Path(folder) / "told.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def _sharing(rank: int, counts: Sequence[int], rounds: int = 5) -> dict[int, float]:
    """Slowdown of so many processes that compute, against one, in turns."""
    cores = len(os.sched_getaffinity(0))
    found: dict[int, list[float]] = {ranks: [] for ranks in counts}
    for _, ranks in itertools.product(range(rounds), counts):
        dist.barrier()
        if rank < ranks:
            found[ranks].append(_pass_seconds())
    dist.barrier()
    if rank:
        return {}
    ratios = {ranks: [a / b for a, b in zip(found[ranks], found[1], strict=True)] for ranks in counts}
    return {ranks: max(1.0, ranks / cores) * max(1.0, statistics.median(of)) for ranks, of in ratios.items()}


def _seconds(way: Callable[[], object], group: dist.ProcessGroup | None = None) -> float:
    laps = []
    for _ in range(LAPS):
        if group is not None:
            dist.barrier(group)
        began = time.perf_counter()
        way()
        laps.append(time.perf_counter() - began)
    return statistics.median(laps)


def _pass_seconds(for_s: float = 1.0) -> float:
    """Seconds of a forward and backward pass of a small model on the CPU, in this process, while others run too."""
    from torch import nn

    layers = [nn.Sequential(nn.Linear(128, 384), nn.SiLU(), nn.Linear(384, 128)) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(128, 128), *layers, nn.Linear(128, 128))
    tokens = torch.randint(0, 128, (4096,))
    laps = []
    ends = time.perf_counter() + for_s
    while time.perf_counter() < ends:
        began = time.process_time()
        model(tokens).logsumexp(dim=-1).sum().backward()
        laps.append(time.process_time() - began)
    return statistics.median(laps)


def _exchange(group: dist.ProcessGroup) -> Callable[[], object]:
    """One exchange between two ranks of rows of a few bytes: what a row costs, whatever it holds."""
    home, target = Layout((0, 1), 2), Layout((0, 1), 2, "balanced")
    lengths = torch.randint(1, 9, (2 * ROWS,), generator=torch.Generator().manual_seed(0))
    ids = torch.arange(2 * ROWS)
    arrays = torch.stack([ids, ids, lengths, lengths, torch.zeros_like(ids)])
    space = RowSpace.of_shards("rows", home, arrays.split(ROWS, dim=1))
    mine: Tensor = lengths.split(ROWS)[dist.get_rank()]
    ragged = Ragged(torch.randn(int(mine.sum())), mine)
    transport = Transport()
    transport._groups[0, 1] = group

    def exchange() -> object:
        buffer = DataBuffer(transport)
        buffer.put("value", ragged, Ragged, space, home)
        buffer.issue("value", target)
        return buffer.get("value", target)

    return exchange


@dataclass(frozen=True)
class MeasuredStep:
    """A step of one rank, and tokens of a row on average."""

    measured: Measured
    lengths: dict[str, float]


def measured_step(config: str, options: Sequence[str], part: int, bare: Hardware) -> MeasuredStep:
    """The config with one rank on one of `part` parts of its prompts."""
    whole = read_simulate(["--config", config, *options])
    prompts = whole.data.prompts_per_step // part
    sizes = [f"--data.prompts_per_step={prompts}", "--trainer.devices=1"]
    updates = handles(whole.module)["actor"].samples_per_update
    if updates is not None:
        sizes.append(f"--module.actor.samples_per_update={updates // part}")
    with tempfile.TemporaryDirectory() as folder:
        lines = run(config, [*options, *sizes], 1, Path(folder) / "run")
        lengths = lengths_of(Path(folder) / "run")
    (Path(bare_file := tempfile.mkstemp(suffix=".yaml")[1])).write_text(as_yaml(replace(bare, gpus_per_node=1), {}))
    tokens = [f"--{name}={value}" for name, value in lengths.items()]
    arguments = ["--config", config, *options, *sizes, f"--hardware={bare_file}", "--scaling=strong", *tokens]
    workload = read_simulate(arguments).predicted.workload
    os.unlink(bare_file)
    seconds = {name.removeprefix("time/"): median(lines, name) for name in lines[-1] if name.startswith("time/")}
    return MeasuredStep((workload, {**seconds, STEP: seconds["step"]}), lengths)


def run(config: str, options: Sequence[str], ranks: int, folder: Path, steps: int = STEPS) -> list[dict[str, float]]:
    """The metrics of a few steps after the first, without validation."""
    fixed = [f"--trainer.devices={ranks}", f"--trainer.run_dir={folder}", f"--trainer.max_steps={steps}"]
    command = [sys.executable, "-m", "rlflow.cli", "fit", "--config", config, "--data.validation=null"]
    ended = subprocess.run(
        [*command, *options, *fixed], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    if ended.returncode:
        raise SystemExit(ended.stderr)
    return [{name: value or 0.0 for name, value in line.items()} for line in read_metrics(folder)][1:]


def lengths_of(folder: Path) -> dict[str, float]:
    """Mean tokens of a row, as `rlflow simulate` takes them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    prompts = [len(tokenizer(sample["prompt"])["input_ids"]) for sample in samples]
    response = median(read_metrics(folder)[1:], "rollout/length")
    return {"prompt_tokens": statistics.fmean(prompts), "response_tokens": response}


def median(lines: Sequence[dict[str, float]], name: str) -> float:
    """The median of a metric over steps."""
    return statistics.median(line[name] for line in lines if name in line)


if __name__ == "__main__":
    main()
