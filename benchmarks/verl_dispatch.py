"""The exchange of the databuffer against verl's: `DataProto` collected by a driver and dispatched again, through Ray.

    python -m venv --system-site-packages /tmp/bench-verl
    /tmp/bench-verl/bin/pip install --no-deps -r requirements/bench_verl.txt
    /tmp/bench-verl/bin/python benchmarks/verl_dispatch.py

Both sides move the same rows in the same order: 1,024 ragged rows on each rank, evened out by tokens. In verl a worker
pads its rows into a `DataProto`, the driver concatenates those of all workers, reorders them as its trainer does to
balance a batch, and sends each worker its part, which cuts the padding off again. `--even` gives all rows one length,
so that nothing is padded. The databuffer's times are those of `benchmarks/exchange.py`, taken just before in the same
run. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import ray
import torch
from torch.nn.utils.rnn import pad_sequence
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from benchmarks.exchange import ROWS, _measure, lengths_of
from rlflow.databuffer.balance import deal, grouped


class Holder(Worker):
    """Holds rows, and gets others."""

    def __init__(self, ranks: int, megabytes: int, even: bool) -> None:
        super().__init__()
        torch.set_num_threads(1)
        every = lengths_of(ranks, megabytes, even)
        self.lengths, self.longest = every.split(ROWS)[self.rank], int(every.max())
        self.held = list(torch.randn(int(self.lengths.sum())).split(self.lengths.tolist()))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ready(self) -> int:
        """Once the rows are there."""
        return len(self.held)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def give(self, order: DataProto) -> DataProto:
        """The rows, padded to one width on all workers."""
        values = pad_sequence(self.held, batch_first=True)
        values = torch.nn.functional.pad(values, (0, self.longest - values.shape[1]))
        return DataProto.from_dict({"values": values, "lengths": self.lengths})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def take(self, rows: DataProto) -> DataProto:
        """Cut the padding off."""
        values, lengths = rows.batch["values"], rows.batch["lengths"]
        slots = torch.arange(values.shape[1]) < lengths[:, None]
        flat = values[slots] if not bool(slots.all()) else values.view(-1)
        return DataProto.from_dict({"entries": torch.full((len(lengths),), flat.numel())})


def main() -> None:
    """Measure each number of workers and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--megabytes", type=int, default=16, help="of rows on each rank")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--even", action="store_true", help="rows of one length, which verl need not pad")
    options = parser.parse_args()
    table = []
    for ranks in options.ranks:
        (ours,) = _measure(ranks, [options.megabytes], options.repeats, options.even)
        seconds = _verl(ranks, options.megabytes, options.repeats, options.even)
        row = {
            "ranks": ranks,
            "megabytes": options.megabytes,
            "verl_ms": 1000 * statistics.median(seconds),
            "verl_spread_ms": [1000 * min(seconds), 1000 * max(seconds)],
            **{name: ours[name] for name in ("databuffer_ms", "bare_ms", "hub_ms")},
        }
        row["speedup"] = row["verl_ms"] / row["databuffer_ms"]
        table.append(row)
        print(
            f"{ranks} ranks, {options.megabytes} MB each: verl {row['verl_ms']:.0f} ms, databuffer"
            f" {row['databuffer_ms']:.1f} ms, bare {row['bare_ms']:.1f} ms; {row['speedup']:.1f} times faster",
            flush=True,
        )
    print(json.dumps({"benchmark": "verl_dispatch", "even": options.even, "table": table}))


def _verl(ranks: int, megabytes: int, repeats: int, even: bool) -> list[float]:
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # of the workers
    ray.init(num_cpus=ranks + 1, include_dashboard=False, logging_level="error")
    try:
        pool = RayResourcePool([ranks], use_gpu=False, max_colocate_count=1)
        remote = RayClassWithInitArgs(ray.remote(Holder), ranks, megabytes, even)
        workers = RayWorkerGroup(pool, remote, device_name="cpu")
        workers.ready()
        lengths = lengths_of(ranks, megabytes, even)
        shares = grouped(deal(lengths_of(ranks, megabytes), ranks), ranks)
        order = torch.cat(shares)
        nothing = DataProto.from_dict({"order": torch.zeros(len(lengths), dtype=torch.int64)})
        seconds = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            rows = workers.give(nothing)
            rows.reorder(order)
            workers.take(rows)
            seconds.append(time.perf_counter() - began)
        return seconds[1:]  # the first starts up
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
