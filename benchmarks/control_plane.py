"""What one rank computes and holds to know where all rows of a step go, as ranks grow to 1,024.

    python benchmarks/control_plane.py

One process does what each rank of a large run does between two collectives, for 1,024 rows a rank of log-normal
lengths: the row space from what was gathered, the partition into as many shards, balanced by tokens in each of four
mini-batches, its route to there, the mini-batches of its rows, and once for the run the plan. No message is sent. The
bytes are those of the tensors that the row space refers to in the end. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlflow.algorithms import GRPO
from rlflow.dag.planner import plan
from rlflow.data.layout import Layout
from rlflow.data.rows import RowSpace
from rlflow.preparation import read_graph
from rlflow.rewards import ExactMatch

ROWS = 1024  # of each rank
GROUP = 16  # samples of a prompt
UPDATES = 4


def main() -> None:
    """Measure each number of ranks and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 1024])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = []
    for ranks in options.ranks:
        table.append(_measure(ranks, options.repeats))
        print(_line(table[-1]), flush=True)
    print(json.dumps({"benchmark": "control_plane", "table": table}))


def _measure(ranks: int, repeats: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {}

    def timed(name: str, way: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = way()
        seconds.setdefault(name, []).append(time.perf_counter() - began)
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
    sums = torch.stack([space.tokens[rows].sum() for rows in space.partition(there).shards]).double()
    timed("plan", lambda: _plan(ranks))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "ranks": ranks,
        "rows": len(space),
        "step_s": sum(value for name, value in medians.items() if name != "plan"),
        **{f"{name}_s": value for name, value in medians.items()},
        "held_bytes": _held(space),
        "max_over_mean": float(sums.max() / sums.mean()),
        "max_over_mean_at_home": _at_home(space),
    }


def _gathered(ranks: int) -> list[Tensor]:
    """What all ranks tell of their rows: `[5, ROWS]` of each."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(ranks * ROWS)
    noise = torch.randn(len(ids), generator=generator, dtype=torch.float64)
    lengths = (500 * torch.exp(noise)).clamp(1, 8192).long()
    prompts = torch.randint(50, 500, (ranks * ROWS // GROUP,), generator=generator).repeat_interleave(GROUP)
    arrays = torch.stack([ids, ids // GROUP, lengths, lengths + prompts, torch.zeros_like(ids)])
    return [each.contiguous() for each in arrays.split(ROWS, dim=1)]


def _plan(ranks: int) -> str:
    """The plan of a step of GRPO on all ranks, its digest, and one rank's part."""
    graph = read_graph(GRPO(model="none", reward=ExactMatch(), kl_coef=0.1))
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
