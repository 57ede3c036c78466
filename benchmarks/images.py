"""Cost of pictures on the edges of a graph: sending their numbers and making tensors, against sending tensors.

    python -m benchmarks.images
    python -m benchmarks.images --simulate

Each rank holds two prompts with a JPEG of each size, and four samples of each prompt; a size is that of the picture's
patches as Qwen3-VL's tower reads them, in float32. Two edges: prompts that go to an engine, and samples that go to a
model, dealt so that tokens are even. Four ways: the numbers of pictures by `DataBuffer`, as rlflow does it; making
tensors of all pictures of the rows that arrive, each once, which comes on top; the patches in a ragged column, once for
each prompt, by `DataBuffer`; and these through rank 0. The time of a repeat is that of the slowest rank. With
`--simulate`, a step of a config on 8 to 1,024 GPUs. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from PIL import Image
from torch import Tensor
from transformers import Qwen2VLImageProcessorPil, Qwen3VLConfig

from benchmarks.exchange import _Hub, _largest, _Recorded, _times
from rlflow.commands.simulate import read_simulate
from rlflow.databuffer.buffer import DataBuffer
from rlflow.databuffer.rows import RowSpace
from rlflow.databuffer.transport import Transport
from rlflow.memory.workload import Workload
from rlflow.models.picture_processor import PictureProcessor
from rlflow.process.freed_memory import keep_freed_memory
from rlflow.simulate.simulation import PredictedStep
from rlflow.values.columns import columns
from rlflow.values.layout import Layout
from rlflow.values.picture import Picture
from rlflow.values.ragged import Ragged

PROMPTS, SAMPLES = 2, 4  # on each rank, of each prompt
PATCH, PIXEL_BYTES = 16, 24  # a side in pixels; of a pixel in float32: three colours in two frames
SIDES = {1: 224, 4: 416, 16: 832, 32: 1184}  # pixels of a side, by the megabytes of patches


def main() -> None:
    """Measure all sizes, or simulate, and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--megabytes", type=int, nargs="+", default=list(SIDES), choices=list(SIDES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--simulate", action="store_true", help="simulate a step instead of measuring edges")
    parser.add_argument("--config", default="configs/qwen3_vl_geo3k_8gpu.yaml", help="of the simulated step")
    parser.add_argument("--making-ms", type=float, default=94.0, help="of a simulated picture, of 24 MB of patches")
    options = parser.parse_args()
    if options.simulate:
        table = _simulated(options.config, options.megabytes, options.making_ms / 1000 / 24)
    else:
        table = [row for ranks in options.ranks for row in _measured(ranks, options.megabytes, options.repeats)]
    print(json.dumps({"benchmark": "images", "simulated": options.simulate, "table": table}))


def _measured(ranks: int, megabytes: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (ranks, megabytes, repeats, folder), nprocs=ranks)
        rows: list[dict[str, Any]] = json.loads((Path(folder) / "rows.json").read_text())
    for row in rows:
        print(", ".join(f"{name} {value:.5g}" if name != "edge" else value for name, value in row.items()), flush=True)
    return rows


def _rank(rank: int, ranks: int, megabytes: Sequence[int], repeats: int, folder: str) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()  # as a rank of a CPU run does
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    rows = [_edge(ranks, size, edge, repeats) for size in megabytes for edge in ("prompts", "samples")]
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def _edge(ranks: int, megabytes: int, edge: str, repeats: int) -> dict[str, Any]:
    """One row of the table; the same on every rank."""
    rank, side = dist.get_rank(), SIDES[megabytes]
    home, target = Layout(tuple(range(ranks)), ranks), Layout(tuple(range(ranks)), ranks, "balanced")
    prompts = ranks * PROMPTS
    pictures = [_picture(number, side) for number in range(prompts)]  # every rank sees the dataset
    samples = SAMPLES if edge == "samples" else 1
    of_samples, of_prompts = _space(home, prompts, samples), _space(home, prompts, 1)
    numbers = torch.arange(prompts).repeat_interleave(samples).view(ranks, -1)[rank]
    patches = torch.randn(PROMPTS * side**2 * PIXEL_BYTES // 4)

    def bring(transport: Transport, space: RowSpace, values: Tensor, rows: int) -> Ragged:
        buffer = DataBuffer(transport)
        lengths = torch.full((rows,), len(values) // rows)
        buffer.put("value", Ragged(values, lengths), Ragged, space, home)
        buffer.issue("value", target)
        arrived: Ragged = buffer.get("value", target)
        return arrived

    def make(found: Ragged) -> None:
        processor = PictureProcessor(_CONFIG, _IMAGES, None)  # with nothing in memory
        processor.inputs([pictures[number] for number in found.values.unique().tolist()])

    direct, sent, hub = _Recorded(), _Recorded(), _Hub()
    arrived = bring(direct, of_samples, numbers, len(numbers))
    seconds: dict[str, list[float]] = {}
    for _ in range(repeats):
        for name, way in (
            ("numbers", lambda: bring(direct, of_samples, numbers, len(numbers))),
            ("making", lambda: make(arrived)),
            ("patches", lambda: bring(sent, of_prompts, patches, PROMPTS)),
            ("hub", lambda: bring(hub, of_prompts, patches, PROMPTS)),
        ):
            seconds.setdefault(name, []).append(_times(way)[0])
    return {
        "edge": edge,
        "ranks": ranks,
        "megabytes": patches.nbytes / PROMPTS / 2**20,
        **{f"{name}_ms": 1000 * statistics.median(times) for name, times in seconds.items()},
        "made_most": _largest(len(arrived.values.unique())),
        "numbers_bytes": _largest(_moved(direct)),
        "patches_bytes": _largest(_moved(sent)),
        "hub_bytes": _largest(hub.busiest_bytes),
    }


_CONFIG = Qwen3VLConfig()
_IMAGES = Qwen2VLImageProcessorPil(size={"shortest_edge": 2**16, "longest_edge": 2**24}, patch_size=PATCH)


def _picture(seed: int, side: int) -> Picture:
    """A JPEG of blots, as large a file as a photograph of that size."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).resize((side, side), Image.Resampling.BICUBIC).save(file, format="jpeg", quality=90)
    return Picture.read(file.getvalue())


def _space(home: Layout, prompts: int, samples: int) -> RowSpace:
    """`samples` rows of each prompt, of random length, so that balancing moves rows to other ranks."""
    ids = torch.arange(prompts * samples)
    tokens = torch.randint(100, 2000, ids.shape, generator=torch.Generator().manual_seed(0))
    arrays = torch.stack([ids, ids // samples, torch.ones_like(ids), tokens, torch.zeros_like(ids)])
    return RowSpace.of_shards("rows", home, arrays.split(len(ids) // home.shards, dim=1))


def _moved(transport: _Recorded) -> int:
    """The more of the bytes that this rank sent to and received from others in the last message."""
    _, sent, received = transport.last
    rank = dist.get_rank()
    return max(sum(sizes) - sizes[rank] for sizes in (sent, received))


@dataclass(frozen=True)
class _Pictured(Workload):
    """A workload whose values have patches instead of numbers, once for each prompt."""

    patch_bytes: float = 0.0

    def value_bytes(self, value: str, padded: bool = False, fields: Any = None) -> float:
        found = super().value_bytes(value, padded, fields)
        if not any(column.name == "pictures" for column in columns(self.graph.type_of(value))):
            return found
        return found + self.patch_bytes * self.prompts / self.rows(self.graph.space_of(value))


def _simulated(config: str, megabytes: Sequence[int], making_s: float) -> list[dict[str, Any]]:
    """A step in rlflow, which makes tensors twice (engine and trainer), and by one controller that sends patches.

    Args:
        config: Config of the run.
        megabytes: Sizes of a prompt's patches.
        making_s: Seconds of a core for making a megabyte of patches.
    """
    table = []
    for nodes in (1, 2, 4, 8, 16, 32, 64, 128):
        simulation = read_simulate(["--config", config, f"--nodes={nodes}", "--scaling=weak"])
        predicted = simulation.predicted
        load = predicted.workload
        given = {each.name: getattr(load, each.name) for each in fields(load)}
        for size in megabytes:
            nbytes = SIDES[size] ** 2 * PIXEL_BYTES
            hub = PredictedStep(_Pictured(**given, patch_bytes=nbytes), predicted.hardware)
            making = 2 * load.prompts / load.ranks * nbytes / 2**20 * making_s
            row = {
                "ranks": load.ranks,
                "megabytes": nbytes / 2**20,
                "rlflow_s": predicted.timelines["rlflow"].seconds + making,
                "making_s": making,
                "hub_s": hub.timelines["packed"].seconds,
            }
            table.append(row | {"ratio": row["hub_s"] / row["rlflow_s"]})
            print(", ".join(f"{name} {value:.4g}" for name, value in table[-1].items()), flush=True)
    return table


if __name__ == "__main__":
    main()
