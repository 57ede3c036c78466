"""Peak memory of the busiest rank during one exchange, as ranks grow and the rows of each stay as many.

    python benchmarks/exchange_memory.py

The rows of `benchmarks/exchange.py`, through `DataBuffer` and through rank 0. The peak is what the kernel counts as
resident at most during the exchange, less what was resident before: messages and the value that arrives, of a process
that hands freed memory back. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks.exchange import _Hub, _largest, _rows, lengths_of
from rlflow.databuffer.buffer import DataBuffer
from rlflow.databuffer.transport import Transport
from rlflow.values.layout import Layout
from rlflow.values.ragged import Ragged


def main() -> None:
    """Measure each number of ranks and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--megabytes", type=int, default=16, help="of rows on each rank")
    options = parser.parse_args()
    table = []
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(_rank, (ranks, options.megabytes, folder), nprocs=ranks)
            row: dict[str, Any] = json.loads((Path(folder) / "row.json").read_text())
        table.append(row)
        print(", ".join(f"{name} {value:g}" for name, value in row.items()), flush=True)
    print(json.dumps({"benchmark": "exchange_memory", "table": table}))


def _rank(rank: int, ranks: int, megabytes: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    home, target = Layout(tuple(range(ranks)), ranks), Layout(tuple(range(ranks)), ranks, "balanced")
    lengths = lengths_of(ranks, megabytes)
    space, ragged, _ = _rows(lengths, lengths, home)
    space.route(rank, home, target, space)

    def bring(transport: Transport) -> Any:
        buffer = DataBuffer(transport)
        buffer.put("value", ragged, Ragged, space, home)
        buffer.issue("value", target)
        return buffer.get("value", target)

    row: dict[str, Any] = {"ranks": ranks, "megabytes": megabytes}
    for name, transport in (("databuffer", Transport()), ("hub", _Hub())):
        bring(transport)  # what gloo itself keeps is there after the first
        gc.collect()
        dist.barrier()
        before = reset_peak()
        found = bring(transport)
        grown = (kilobytes("VmHWM") - before) / 1024
        del found
        row[f"{name}_peak_mb"] = round(_largest(grown), 1)
    if rank == 0:
        (Path(folder) / "row.json").write_text(json.dumps(row))
    dist.destroy_process_group()


def reset_peak() -> int:
    """Forget the peak until now; kilobytes resident."""
    Path("/proc/self/clear_refs").write_text("5")
    return kilobytes("VmRSS")


def kilobytes(name: str) -> int:
    """A line of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
