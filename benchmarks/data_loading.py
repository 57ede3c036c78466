"""Reads and memory of each rank: a loader on every rank, against one rank that loads all rows and scatters them.

    python -m benchmarks.data_loading

A JSONL file of 40,000 rows of about 1 kB. Each rank makes its loader (the ranks look once at every row, each at a share
of them, to find what is too long; a second time they find what was kept) and then reads its rows of three steps; or
rank 0 reads the file into a list, and at each step encodes
the global batch and scatters the parts. Rows are counted as they are asked of the file, bytes as those of their lines;
memory is the growth of the peak resident size of the busiest rank. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks.exchange import _largest
from benchmarks.exchange_memory import kilobytes, reset_peak
from rlflow.data.loader import Loader, collate, scan_together, share
from rlflow.data.prompts import Encoder, PromptData
from rlflow.data.sources import JSONL, Source
from rlflow.databuffer.transport import Transport
from rlflow.models.tiny import tiny_tokenizer

PROMPTS = 1024  # of a step
STEPS = 3


def main() -> None:
    """Measure each number of ranks and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rows", type=int, default=40_000)
    options = parser.parse_args()
    table = []
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            with (Path(folder) / "rows.jsonl").open("w") as file:
                for row in range(options.rows):
                    file.write(json.dumps({"question": f"{row} " + "abcdefg " * (100 + row % 50)}) + "\n")
            for way in ("own", "again", "scatter"):
                torch.multiprocessing.spawn(_rank, (ranks, way, folder), nprocs=ranks)
                table.append(json.loads((Path(folder) / "row.json").read_text()))
                print(", ".join(f"{name} {value}" for name, value in table[-1].items()), flush=True)
    print(json.dumps({"benchmark": "loading", "table": table}))


class Counted(JSONL):
    """Counts what is read of it."""

    rows = bytes = 0

    def __getitem__(self, row: int) -> dict[str, Any]:
        found = super().__getitem__(row)
        self.rows += 1
        self.bytes += len(json.dumps(found)) + 1
        return found


class Held(Source):
    """Rows that are in memory."""

    name = "held"

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.rows[row]


def _rank(rank: int, ranks: int, way: str, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["RLFLOW_CACHE"] = f"{folder}/cache"
    store = f"file://{folder}/store-{way}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    source, tokenizer = Counted(f"{folder}/rows.jsonl"), tiny_tokenizer()
    data = PromptData(source, prompts_per_step=PROMPTS, max_prompt_length=2048).resolved()
    source.rows = source.bytes = 0
    dist.barrier()
    before, began = reset_peak(), time.perf_counter()
    if way != "scatter":
        loader = Loader(source, data, tokenizer, seed=0, ranks=ranks)
        scan_together([loader], Transport(), keeps=rank == 0)
    else:
        held = Held([source[row] for row in range(len(source))] if rank == 0 else [])
        encode = Encoder(data, tokenizer)
    dist.barrier()
    started = time.perf_counter() - began
    read = source.rows, source.bytes
    began = time.perf_counter()
    for step in range(STEPS):
        if way != "scatter":
            loader.batch(step, rank, ranks)
            continue
        parts = None
        if rank == 0:
            examples = encode(held, list(range(step * PROMPTS, (step + 1) * PROMPTS)))
            parts = [collate([examples[i] for i in share(PROMPTS, shard, ranks)], 0) for shard in range(ranks)]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, parts)
    dist.barrier()
    row = {
        "ranks": ranks,
        "way": way,
        "start_s": round(_largest(started), 2),
        "step_ms": round(1000 * _largest(time.perf_counter() - began) / STEPS, 1),
        "rows_read_at_start": int(_largest(read[0])),
        "rows_read_a_step": int(_largest((source.rows - read[0]) / STEPS)),
        "bytes_read_a_step": int(_largest((source.bytes - read[1]) / STEPS)),
        "peak_mb": round(_largest((kilobytes("VmHWM") - before) / 1024), 1),
    }
    if rank == 0:
        (Path(folder) / "row.json").write_text(json.dumps(row))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
