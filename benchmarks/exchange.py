"""The databuffer's exchange against the same rows sent through rank 0, and against a bare `all_to_all_single`.

    python benchmarks/exchange.py

Every rank holds 1,024 ragged rows and reads as many others, evened out by tokens. The ways, one after another within
each repeat: `DataBuffer` as it is; the same rows in the same buffer over a transport that gathers messages to rank 0,
regroups and scatters them (rows are packed and unpacked by the ranks that hold and read them, as in the first way);
one `all_to_all_single` of the first way's bytes into memory that is there already, neither packed nor unpacked; and
the rows as a right-padded tensor in `DataBuffer`, which reads twice the bytes that it receives into memory; the first
way with nothing sent, over a transport on which all has arrived already; and one copy of the first way's bytes in the
order of memory. The time of a repeat is that of the slowest rank, its processor time the mean of the ranks. Where rows
go is worked out once for all values of a step, and timed apart as `route_ms`. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.distributed import Work
from torch.nn.utils.rnn import pad_sequence

from rlflow.databuffer.buffer import DataBuffer
from rlflow.databuffer.rows import RowSpace
from rlflow.databuffer.transport import Transport
from rlflow.process.freed_memory import keep_freed_memory
from rlflow.values.column_kinds import PerToken
from rlflow.values.layout import Layout
from rlflow.values.ragged import Ragged

ROWS = 1024  # on each rank
HEADLINE_RANKS, HEADLINE_MEGABYTES = 8, 16


def main() -> None:
    """Measure all sizes and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 4, 16, 64], help="of rows on each rank")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    table = []
    for ranks in options.ranks:
        table += _measure(ranks, options.megabytes, options.repeats)
        for row in table[-len(options.megabytes) :]:
            print(_line(row), flush=True)
    print(json.dumps(_summary(table)))


def _measure(ranks: int, megabytes: Sequence[int], repeats: int, even: bool = False) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (ranks, megabytes, repeats, folder, even), nprocs=ranks)
        rows: list[dict[str, Any]] = json.loads((Path(folder) / "rows.json").read_text())
        return rows


def _rank(rank: int, ranks: int, megabytes: Sequence[int], repeats: int, folder: str, even: bool) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()  # as a rank of a CPU run does
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    rows = [_compare(ranks, size, repeats, even) for size in megabytes]
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def _compare(ranks: int, megabytes: int, repeats: int, even: bool) -> dict[str, Any]:
    """One row of the table; the same on every rank."""
    home, target = Layout(tuple(range(ranks)), ranks), Layout(tuple(range(ranks)), ranks, "balanced")
    space, ragged, padded = _rows(lengths_of(ranks, megabytes, even), lengths_of(ranks, megabytes), home)
    began = time.perf_counter()
    space.route(dist.get_rank(), home, target, space)
    route_s = time.perf_counter() - began

    def bring(transport: Transport, value: Ragged | Tensor) -> Any:
        buffer = DataBuffer(transport)
        buffer.put("value", value, Ragged if isinstance(value, Ragged) else PerToken, space, home)
        buffer.issue("value", target)
        return buffer.get("value", target)

    direct, hub = _Recorded(), _Hub()
    assert torch.equal(bring(direct, ragged).values, bring(hub, ragged).values), "both ways bring the same rows"
    message, send_sizes, receive_sizes = direct.last
    received, copied = torch.empty(sum(receive_sizes), dtype=torch.uint8), torch.empty_like(message)
    unsent = _Unsent(direct.arrived[-2:])  # sizes of rows, and the rows
    ways: dict[str, Callable[[], object]] = {
        "databuffer": lambda: bring(direct, ragged),
        "hub": lambda: bring(hub, ragged),
        "bare": lambda: dist.all_to_all_single(received, message, receive_sizes, send_sizes),
        "padded": lambda: bring(direct, padded),
        "unsent": lambda: bring(unsent, ragged),
        "copy": lambda: copied.copy_(message),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    for _, (name, way) in itertools.product(range(repeats), ways.items()):
        slowest, mean = _times(way)
        seconds[name].append(slowest)
        processor[name].append(mean)
    payload, rank = ragged.values.nbytes, dist.get_rank()
    assert sum(send_sizes) <= payload, "no rank sends more than it holds, what it sends to itself included"
    of_others = [sum(sizes) - sizes[rank] for sizes in (send_sizes, receive_sizes)]
    return {
        "ranks": ranks,
        "megabytes": megabytes,
        "route_ms": 1000 * _largest(route_s),
        **{f"{name}_ms": 1000 * statistics.median(times) for name, times in seconds.items()},
        "spread_ms": {name: [1000 * min(times), 1000 * max(times)] for name, times in seconds.items()},
        "processor_ms": {name: 1000 * statistics.median(times) for name, times in processor.items()},
        "payload_bytes": int(_largest(payload)),
        "busiest_rank_bytes": {
            "databuffer": int(_largest(max(of_others))),
            "hub": int(_largest(hub.busiest_bytes)),
        },
    }


def lengths_of(ranks: int, megabytes: int, even: bool = False) -> Tensor:
    """Entries of the rows of all ranks, of 4 bytes, `megabytes` on each rank; of one length where `even`."""
    entries = megabytes * 2**20 // 4
    if even:
        return torch.full((ranks * ROWS,), entries // ROWS)
    return torch.randint(1, 2 * entries // ROWS, (ranks * ROWS,), generator=torch.Generator().manual_seed(0))


def _rows(lengths: Tensor, tokens: Tensor, home: Layout) -> tuple[RowSpace, Ragged, Tensor]:
    """The rows of all ranks, and this rank's twice: float32, of these lengths, dealt by `tokens`; and padded."""
    ids = torch.arange(len(lengths))
    arrays = torch.stack([ids, ids, lengths, tokens, torch.zeros_like(ids)])
    space = RowSpace.of_shards("rows", home, arrays.split(ROWS, dim=1))
    mine = lengths.split(ROWS)[dist.get_rank()]
    ragged = Ragged(torch.randn(int(mine.sum())), mine)
    return space, ragged, pad_sequence(list(ragged.rows()), batch_first=True)


def _times(way: Callable[[], object]) -> tuple[float, float]:
    """The seconds of the slowest rank, and the processor time of a rank, the mean of all."""
    dist.barrier()
    began, computed = time.perf_counter(), time.process_time()
    way()
    computed = time.process_time() - computed
    return _largest(time.perf_counter() - began), _mean(computed)


def _largest(number: float) -> float:
    """Over all ranks."""
    largest = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def _mean(number: float) -> float:
    """Over all ranks."""
    total = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


class _Recorded(Transport):
    """Remembers its last message, to send the same bytes bare, and what arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived: list[Tensor] = []

    def all_to_all(
        self, send: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], ranks: tuple[int, ...]
    ) -> tuple[Tensor, Work]:
        self.last = (send, list(send_sizes), list(receive_sizes))
        received, work = super().all_to_all(send, send_sizes, receive_sizes, ranks)
        self.arrived = [*self.arrived[-1:], received]
        return received, work


class _Unsent(Transport):
    """Sends nothing: what arrived before arrives again, one message after another."""

    def __init__(self, arrived: Sequence[Tensor]) -> None:
        super().__init__()
        self._arrived = itertools.cycle(arrived)

    def all_to_all(
        self, send: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], ranks: tuple[int, ...]
    ) -> tuple[Tensor, Work]:
        return next(self._arrived), _Done()


class _Hub(Transport):
    """Gathers all messages to rank 0, regroups them there by receiver, and scatters them: as one controller would.

    Attributes:
        busiest_bytes: The more of what this rank sent and received for the last message.
    """

    def all_to_all(
        self, send: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], ranks: tuple[int, ...]
    ) -> tuple[Tensor, Work]:
        sizes = torch.stack(self.all_gather(torch.tensor(send_sizes)))  # [giver, taker]
        sent, received = sizes.sum(dim=1), sizes.sum(dim=0)
        to_hub, from_hub = (
            send.new_empty(int(total.max())) for total in (sent, received)
        )  # collectives of equal parts
        to_hub[: send.numel()] = send
        gathered = [torch.empty_like(to_hub) for _ in ranks] if self.rank == 0 else None
        dist.gather(to_hub, gathered)
        scattered = None
        if gathered is not None:
            parts = [
                message[: int(total)].split(row.tolist())
                for message, total, row in zip(gathered, sent, sizes, strict=True)
            ]
            scattered = [torch.empty_like(from_hub) for _ in ranks]
            for taker, message in enumerate(scattered):
                torch.cat([of_giver[taker] for of_giver in parts], out=message[: int(received[taker])])
        dist.scatter(from_hub, scattered)
        through_hub = int(max(sent.sum() - sent[0], received.sum() - received[0]))
        self.busiest_bytes = through_hub if self.rank == 0 else max(int(sent[self.rank]), int(received[self.rank]))
        return from_hub[: sum(receive_sizes)], _Done()


class _Done:
    """Nothing is left to wait for."""

    def wait(self) -> None:
        """Return at once."""


def _line(row: dict[str, Any]) -> str:
    ways = ", ".join(
        f"{name} {row[f'{name}_ms']:.1f} ms ({low:.1f} to {high:.1f})" for name, (low, high) in row["spread_ms"].items()
    )
    processor = ", ".join(f"{name} {taken:.2f}" for name, taken in row["processor_ms"].items())
    return (
        f"{row['ranks']} ranks, {row['megabytes']} MB each: {ways}; routes {row['route_ms']:.1f} ms;"
        f" processor time of a rank: {processor} ms"
    )


def _summary(table: list[dict[str, Any]]) -> dict[str, Any]:
    """The claims, at 8 ranks and 16 MB where these were measured, and the whole table."""
    headline = [row for row in table if (row["ranks"], row["megabytes"]) == (HEADLINE_RANKS, HEADLINE_MEGABYTES)]
    claims = {
        key: value
        for row in headline
        for key, value in (
            ("speedup_8_ranks_16_mb", row["hub_ms"] / row["databuffer_ms"]),
            ("ratio_to_bare", row["databuffer_ms"] / row["bare_ms"]),
        )
    }
    size = HEADLINE_MEGABYTES if headline else table[-1]["megabytes"]
    busiest = {
        way: {str(row["ranks"]): row["busiest_rank_bytes"][way] for row in table if row["megabytes"] == size}
        for way in ("databuffer", "hub")
    }
    return {"benchmark": "exchange", **claims, "busiest_rank_bytes": busiest, "table": table}


if __name__ == "__main__":
    main()
