"""Time and memory of one rank's bookkeeping in a step, in addition to its own work, with up to 1,024 ranks.

    python benchmarks/control_plane.py

One process does what each rank of a large run does between two collectives, for 1,024 rows a rank of log-normal
lengths: the row space from what was gathered, the partition into as many shards, balanced by tokens in each of four
mini-batches, its route to there, the mini-batches of its rows, the reduction of its metrics, its trace, and once for
the run the plan. The processor's seconds are printed with the clock's, for a machine that others share. **No message is
sent**: what collectives take is not measured at these sizes. For the metrics' two reductions it is worked out as
`rlflow simulate` does, on nodes of 8 H100s, and measured with gloo among as many real processes as `--processes` says.
The bytes are those of the tensors that the row space refers to in the end. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from rlflow import CausalLM
from rlflow.algorithms import GRPO
from rlflow.dag.planner import plan
from rlflow.databuffer.rows import RowSpace
from rlflow.databuffer.transport import Transport
from rlflow.functional import KL
from rlflow.loggers.trace import Trace
from rlflow.metrics import Metrics, StepMetrics
from rlflow.rewards import ExactMatch
from rlflow.run.prepare import read_graph
from rlflow.simulate.costs import gather_seconds
from rlflow.simulate.hardware import PRESETS
from rlflow.values.layout import Layout

ROWS = 1024  # of each rank
GROUP = 16  # samples of a prompt
UPDATES = 4
NAMES = 100  # of metrics; GRPO with a reference logs about 60
SPANS = 100  # of a step in a trace; GRPO with two exchanges writes about 40


def main() -> None:
    """Measure each number of ranks and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 1024])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4, 8], help="that reduce metrics by gloo")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = []
    for ranks in options.ranks:
        table.append(_measure(ranks, options.repeats))
        print(_line(table[-1]), flush=True)
    reduced = {}
    for processes in options.processes:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(_reducing_rank, (processes, folder, options.repeats), nprocs=processes)
            reduced[processes] = json.loads((Path(folder) / "seconds.json").read_text())
        print(f"metrics of {processes} processes by gloo: {1000 * reduced[processes]:.1f} ms a step", flush=True)
    print(json.dumps({"benchmark": "control_plane", "table": table, "reduced_s": reduced}))


def _measure(ranks: int, repeats: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {}
    computed: dict[str, list[float]] = {}  # by the processor

    def timed(name: str, way: Callable[[], Any]) -> Any:
        began, began_computing = time.perf_counter(), time.process_time()
        result = way()
        seconds.setdefault(name, []).append(time.perf_counter() - began)
        computed.setdefault(name, []).append(time.process_time() - began_computing)
        return result

    home = Layout(tuple(range(ranks)), ranks)
    there = Layout(tuple(range(ranks)), ranks, "balanced", ranks * ROWS // UPDATES)
    gathered = _gathered(ranks)
    rank = ranks // 2
    for _ in range(repeats):
        space = timed("rows", lambda: RowSpace.of_shards("rollout", home, gathered))
        timed("partition", lambda space=space: space.partition(there))
        timed("route", lambda space=space: space.route(rank, home, there, space))
        timed("mini_batches", lambda space=space: space.held_mini_batches(there, rank))
    transport, metrics = _Alone(rank, ranks), Metrics()
    with tempfile.TemporaryDirectory() as folder:
        trace = Trace(Path(folder), rank, ranks)
        for repeat in range(repeats + 1):
            _log(metrics.of(repeat), rank)
            (timed if repeat else _once)(
                "metrics", lambda step=repeat: metrics.reduce(step, transport, worked=1.0 + rank / ranks)
            )
            (timed if repeat else _once)("trace", lambda repeat=repeat: _write(trace, repeat))
        trace.close()
    sums = torch.stack([space.tokens[rows].sum() for rows in space.partition(there).shards]).double()
    timed("plan", lambda: _plan(ranks))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "ranks": ranks,
        "rows": len(space),
        "step_s": sum(value for name, value in medians.items() if name != "plan"),
        "step_cpu_s": sum(statistics.median(times) for name, times in computed.items() if name != "plan"),
        **{f"{name}_s": value for name, value in medians.items()},
        "metrics_links_s": _link_seconds(ranks),
        "held_bytes": _held(space),
        "max_over_mean": float(sums.max() / sums.mean()),
        "max_over_mean_at_home": _at_home(space),
    }


class _Alone(Transport):
    """One of many ranks, which hears from no other: reductions give its own numbers back."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        return tensor.clone()

    def all_gather(self, tensor: Tensor, ranks: tuple[int, ...] | None = None) -> list[Tensor]:
        return [tensor]


def _once(name: str, way: Callable[[], Any]) -> None:
    """Run one way without timing it: names are learned, files opened."""
    way()


def _log(metrics: StepMetrics, rank: int) -> None:
    for name in range(NAMES):
        (metrics.sum if name % 4 == 0 else metrics.largest if name % 4 == 1 else metrics.number)(f"{name}", rank + 0.5)


def _write(trace: Trace, step: int) -> None:
    for span in range(SPANS):
        trace.span(f"run       node {span}: ranks 0-1023", "RunNode", span, span + 0.5, step=step)


def _link_seconds(ranks: int) -> float:
    """Seconds of the two reductions on nodes of 8 H100s, each as long as a reduce-scatter and a gather: computed."""
    largest, totals = 2 * 8 * (NAMES + 2), 2 * 8 * (NAMES + 1) + 8 * ranks
    return sum(2 * gather_seconds(nbytes, ranks, PRESETS["h100"]) for nbytes in (largest, totals))


def _reducing_rank(rank: int, ranks: int, folder: str, repeats: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    transport, metrics, seconds = Transport(), Metrics(), []
    for repeat in range(4 * repeats + 1):
        _log(metrics.of(repeat), rank)
        dist.barrier()
        began = time.perf_counter()
        metrics.reduce(repeat, transport, worked=1.0)
        seconds += [time.perf_counter() - began] if repeat else []
    if rank == 0:
        (Path(folder) / "seconds.json").write_text(json.dumps(statistics.median(seconds)))
    dist.barrier()
    dist.destroy_process_group()


def _gathered(ranks: int) -> list[Tensor]:
    """The gathered descriptions of all ranks' rows: `[5, ROWS]` of each."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(ranks * ROWS)
    noise = torch.randn(len(ids), generator=generator, dtype=torch.float64)
    lengths = (500 * torch.exp(noise)).clamp(1, 8192).long()
    prompts = torch.randint(50, 500, (ranks * ROWS // GROUP,), generator=generator).repeat_interleave(GROUP)
    arrays = torch.stack([ids // GROUP, ids, lengths, lengths + prompts, torch.zeros_like(ids)])
    return [each.contiguous() for each in arrays.split(ROWS, dim=1)]


def _plan(ranks: int) -> str:
    """The plan of a step of GRPO on all ranks, its digest, and one rank's part."""
    graph = read_graph(GRPO(CausalLM("none"), reward=ExactMatch(), kl=KL(0.1)))
    everywhere = tuple(range(ranks))
    trained = Layout(everywhere, ranks, "balanced", ranks * ROWS // UPDATES)
    layouts = dict.fromkeys(graph.roles(), trained) | {"rollout": Layout(everywhere, ranks)}
    made = plan(graph, layouts, ranks)
    made.for_rank(ranks // 2)
    return made.digest


def _at_home(space: RowSpace) -> float:
    sums = torch.stack([space.tokens[rows].sum() for rows in space.home[1].shards]).double()
    return float(sums.max() / sums.mean())


def _held(thing: Any) -> int:
    """Bytes of the distinct memory of the tensors that an object refers to."""
    seen: dict[int, int] = {}
    visited: set[int] = set()

    def visit(found: Any) -> None:
        if id(found) in visited:
            return
        visited.add(id(found))
        if isinstance(found, Tensor):
            storage = found.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        elif dataclasses.is_dataclass(found):
            for value in vars(found).values():
                visit(value)
        elif isinstance(found, dict):
            for value in found.values():
                visit(value)
        elif isinstance(found, list | tuple):
            for value in found:
                visit(value)

    visit(thing)
    return sum(seen.values())


def _line(row: dict[str, Any]) -> str:
    parts = ", ".join(f"{name.removesuffix('_s')} {1000 * row[name]:.1f} ms" for name in row if name.endswith("_s"))
    return (
        f"{row['ranks']} ranks, {row['rows']} rows: {parts}; holds {row['held_bytes'] / 1e6:.1f} MB;"
        f" largest over mean {row['max_over_mean_at_home']:.3f} -> {row['max_over_mean']:.4f}"
    )


if __name__ == "__main__":
    main()
