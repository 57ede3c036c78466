"""The gain of each part of the data plane in a step: each part removed alone, and all together, over an emulated link.

    python benchmarks/ablation.py

GRPO with a reference on four gloo ranks, every role on all of them. **Computation and the link are emulated by
sleeps**, because cores that all ranks share hide nothing: 0.6 s to generate, 40 ms a reward, 0.4 and 2 ms a token to
score and to train, rows of log-normal lengths (mean 48, sigma 1). A message takes 2 ms and its bytes, those that this
rank sends or receives, over a link of 100 kB/s, one message after another; a rank that waits for it sleeps. The link is
so slow that an exchange of the samples takes a fifth of the time of their rewards; the texts of a large model on a fast
network take far less of a step. Everything else is really computed and moved, by a very small model.

- kept: a value that is read where it was made is the same object. Without, each such read brings the value from a store
  whose rows lie on ranks at random: its bytes cross the link, of which this rank has one in four itself.
- double buffer: an exchange is issued when its value exists, and the next prompts are read meanwhile (their reading
  takes 100 ms). Without, both happen when they are asked for.
- balance: tokens are evened out between ranks. Without, rows stay where they were made.
- all-to-all: without, messages go through rank 0, in and out, over its link.

The runs take turns; figures are medians of steps over that of the full design. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from central_rank import Hub
from small_run import (
    EmulatedGRPO,
    OddCharacters,
    Parts,
    ScriptedEngine,
    Trained,
    on_ranks,
    prompts,
    spread,
    step_seconds,
    train,
)
from torch import Tensor

from rlflow import CausalLM
from rlflow.data.loader import Loader, Prefetch
from rlflow.databuffer.balance import Balance
from rlflow.databuffer.buffer import DataBuffer
from rlflow.databuffer.rows import RowSpace
from rlflow.databuffer.transport import Transport
from rlflow.functional import KL
from rlflow.models.tiny import write_tiny_model
from rlflow.values.layout import Layout

RANKS = 4
BYTES_PER_S, LATENCY_S, BYTES_PER_TOKEN = 100e3, 2e-3, 16
GENERATE_S, LOAD_S = 0.6, 0.1
REWARD_S, SCORE_S, TRAIN_S = 40e-3, 0.4e-3, 2e-3


@dataclass(frozen=True)
class Design:
    """The parts of the data plane that a run has."""

    kept: bool = True
    double_buffer: bool = True
    balance: bool = True
    all_to_all: bool = True


DESIGNS = {
    "full": Design(),
    "without local values kept": Design(kept=False),
    "without double buffer": Design(double_buffer=False),
    "without balance": Design(balance=False),
    "without all-to-all (hub)": Design(all_to_all=False),
    "without any": Design(False, False, False, False),
}


def main() -> None:
    """Run the designs in turns and print a table of ratios and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="of a run, after those that warm up")
    parser.add_argument("--rounds", type=int, default=2, help="how often all designs run")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder) / "model", hidden_size=32, intermediate_size=64, layers=1)
        found: list[list[dict[str, Trained]]] = on_ranks(RANKS, rounds, Path(folder), given.steps, given.rounds)
    seconds = {
        name: [s for number in range(given.rounds) for s in step_seconds([rank[number][name] for rank in found])]
        for name in DESIGNS
    }
    waited = {
        name: statistics.median(step["time/exchange_wait"] for step in found[0][0][name].metrics) for name in DESIGNS
    }
    full = statistics.median(seconds["full"])
    ratios = {name: statistics.median(times) / full for name, times in seconds.items()}
    for name, times in seconds.items():
        print(f"{name:26} {ratios[name]:5.2f}   {spread(times)}; a rank waits {waited[name]:.2f} s for exchanges")
    print(
        json.dumps(
            {
                "benchmark": "ablation",
                "ratio_to_full": ratios,
                "step_seconds": {name: statistics.median(times) for name, times in seconds.items()},
                "exchange_wait_seconds": waited,
                "exchange_bytes": {name: bytes_moved(found, name) for name in DESIGNS},
            }
        )
    )


def bytes_moved(found: list[list[dict[str, Trained]]], name: str) -> float:
    """Payload of all ranks in a step, the median; what a store without local values moves is not counted."""
    return statistics.median(step["exchange/bytes"] for step in found[0][0][name].metrics)


def rounds(folder: Path, steps: int, count: int) -> list[dict[str, Trained]]:
    """All designs, `count` times, on this rank."""
    return [{name: run(folder, steps, design) for name, design in DESIGNS.items()} for _ in range(count)]


def run(folder: Path, steps: int, design: Design) -> Trained:
    module = EmulatedGRPO(
        CausalLM(str(folder / "model")), OddCharacters(), group_size=4, max_response_length=512, kl=KL(0.1)
    )
    module.reward_s, module.score_s, module.train_s = REWARD_S, SCORE_S, TRAIN_S
    buffers = {(True, True): DataBuffer, (False, True): NotKept, (True, False): Late, (False, False): NotKeptAndLate}
    parts = Parts(
        transport=Link if design.all_to_all else HubLink,
        buffer=buffers[design.kept, design.double_buffer],
        prompts=read_ahead if design.double_buffer else ReadOnTheSpot,
    )
    rates = {"tokens_per_s": 1 / (SCORE_S + TRAIN_S), "bytes_per_s": BYTES_PER_S, "bytes_per_token": BYTES_PER_TOKEN}
    balance = Balance("auto" if design.balance else "off", **rates)
    engine = ScriptedEngine(48, sigma=1.0, seconds=GENERATE_S)
    return train(module, prompts(folder, 256, 8), steps, parts, engine, balance=balance, logprob_gap_limit=1e9)


class Emulated:
    """A message that is there no sooner than `ready`, of `time.perf_counter`."""

    def __init__(self, work: dist.Work, ready: float) -> None:
        self._work, self._ready = work, ready

    def wait(self) -> None:
        """Sleep until it is there."""
        self._work.wait()
        time.sleep(max(0.0, self._ready - time.perf_counter()))


class OneLink:
    """This rank's link, which carries one message after another."""

    def __init__(self) -> None:
        self._free = 0.0

    def carry(self, work: dist.Work, *hops: int) -> dist.Work:
        """The work, delayed by as many messages of these bytes, one after the other."""
        self._free = max(self._free, time.perf_counter()) + sum(LATENCY_S + nbytes / BYTES_PER_S for nbytes in hops)
        return Emulated(work, self._free)


class Link(Transport):
    """All-to-all, each rank over its own link."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._link = OneLink()

    def all_to_all(
        self, send: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], ranks: tuple[int, ...]
    ) -> tuple[Tensor, dist.Work]:
        received, work = super().all_to_all(send, send_sizes, receive_sizes, ranks)
        own = send_sizes[ranks.index(self.rank)]
        moved = send.element_size() * (max(sum(send_sizes), sum(receive_sizes)) - own)
        return received, self._link.carry(work, moved)


class HubLink(Hub):
    """Through rank 0: everybody's bytes in over its link, then out again."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._link = OneLink()

    def all_to_all(
        self, send: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], ranks: tuple[int, ...]
    ) -> tuple[Tensor, dist.Work]:
        received, work = super().all_to_all(send, send_sizes, receive_sizes, ranks)
        return received, self._link.carry(work, *self.last_bytes)


class Late(DataBuffer):
    """Issues an exchange when it is first read; right where all ranks read, in one order, as in these runs."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self._asked: dict[tuple[str, Layout, RowSpace | None], Collection[str] | None] = {}

    def issue(
        self, name: str, target: Layout, space: RowSpace | None = None, columns: Collection[str] | None = None
    ) -> None:
        self._asked[name, target, space] = columns

    def get(self, name: str, layout: Layout, space: RowSpace | None = None) -> Any:
        if (name, layout, space) in self._asked:
            super().issue(name, layout, space, self._asked.pop((name, layout, space)))
        return super().get(name, layout, space)


class NotKept(DataBuffer):
    """Has no value at hand: a read that needs no exchange, or no other one, brings the value from a store."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self._read: set[tuple[str, Layout, RowSpace]] = set()

    def get(self, name: str, layout: Layout, space: RowSpace | None = None) -> Any:
        made = self._values[name]
        reader = space or made.space
        moves = made.space.route(self._transport.rank, made.layout, layout, reader).moves
        again = (name, layout, reader) in self._read
        self._read.add((name, layout, reader))
        value = super().get(name, layout, space)
        if again or not moves:
            self._fetch(name, layout, made.nbytes)
        return value

    def _fetch(self, name: str, layout: Layout, nbytes: int) -> None:
        """Bring as many bytes as the value has on this rank, evenly from all ranks of the layout."""
        count = len(layout.ranks)
        of_ranks = [int(each) // count for each in self._transport.all_gather(torch.tensor(nbytes), layout.ranks)]
        mine = of_ranks[layout.ranks.index(self._transport.rank)]
        message = torch.zeros(sum(of_ranks), dtype=torch.uint8)
        with self._waiting(name, layout):
            self._transport.all_to_all(message, of_ranks, [mine] * count, layout.ranks)[1].wait()


class NotKeptAndLate(NotKept, Late):
    """Both."""


class SlowLoader:
    """Takes a while for each draw, as remote files do."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self.chosen = loader.chosen

    def batch(self, draw: int, shard: int, shards: int) -> Any:
        time.sleep(LOAD_S)
        return self._loader.batch(draw, shard, shards)


def read_ahead(loader: Loader, draws: int | None) -> Prefetch:
    """Reading ahead, as a run does it."""
    return Prefetch(cast(Loader, SlowLoader(loader)), draws)


class ReadOnTheSpot(SlowLoader):
    """Loader in the place of `Prefetch`, without reading ahead."""

    def __init__(self, loader: Loader, draws: int | None) -> None:
        super().__init__(loader)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Nothing is left to end."""


if __name__ == "__main__":
    main()
