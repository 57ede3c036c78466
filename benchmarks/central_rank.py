"""One training run with its data by all-to-all and through rank 0: the same bits; bytes and seconds of each way.

    python benchmarks/central_rank.py

GRPO with a frozen reference on three gloo ranks: engines on ranks 0 and 1, the actor on ranks 1 and 2, the reference on
all, so that every value moves. Everything is computed, on whatever cores there are; transformers generates. The run is
made over the `Transport` that rlflow uses, and over one that gathers each message to rank 0, regroups and scatters it,
as one controller would. After the same steps, all weights and all metrics but times and bytes are compared bit for bit.
Bytes are those of exchanges through the rank that moves most. The runs take turns; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_run import WARM_UP, OddCharacters, Parts, Trained, numbers, on_ranks, prompts, spread, step_seconds, train
from torch import Tensor
from torch.distributed import Work

from rlflow import CausalLM, Optimizer
from rlflow.algorithms import GRPO
from rlflow.databuffer.transport import Transport
from rlflow.functional import KL
from rlflow.models.tiny import write_tiny_model

RANKS = 3
PLACEMENT = {"rollout": "0-1", "actor": "1-2"}


def main() -> None:
    """Run both ways in turns and print their times, their bytes, and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="of a run, after those that warm up")
    parser.add_argument("--rounds", type=int, default=2, help="how often both ways run")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder) / "model", seed=1, hidden_size=64, intermediate_size=128)
        found = on_ranks(RANKS, rounds, Path(folder), given.steps, given.rounds)
    ways: dict[str, list[list[Trained]]] = {
        way: [[rank[number][way] for rank in found] for number in range(given.rounds)] for way in WAYS
    }
    seconds = {way: [s for ranks in runs for s in step_seconds(ranks)] for way, runs in ways.items()}
    busiest = {
        way: max(rank.counted["counted_bytes"] for rank in runs[0]) // (WARM_UP + given.steps)
        for way, runs in ways.items()
    }
    differing = differences(ways)
    for way in WAYS:
        print(f"{way}: {spread(seconds[way])} a step, {busiest[way]:,} bytes a step through the busiest rank")
    print(f"weights and metrics that differ in any bit: {differing or 'none'}")
    median = {way: statistics.median(times) for way, times in seconds.items()}
    print(
        json.dumps(
            {
                "benchmark": "hub",
                "bit_equal": not differing,
                "compared_tensors": len(ways["hub"][0][1].weights),
                "compared_metrics": sum(len(numbers(step)) for step in ways["hub"][0][0].metrics),
                "step_seconds": median,
                "step_ratio_hub_to_all_to_all": median["hub"] / median["all_to_all"],
                "busiest_rank_bytes": busiest,
            }
        )
    )


def rounds(folder: Path, steps: int, count: int) -> list[dict[str, Trained]]:
    """Both ways, `count` times, on this rank."""
    return [{way: run(folder, steps, transport) for way, transport in WAYS.items()} for _ in range(count)]


def run(folder: Path, steps: int, transport: Any) -> Trained:
    module = GRPO(
        CausalLM(str(folder / "model"), optimizer=Optimizer(lr=3e-3), samples_per_update=16),
        OddCharacters(),
        group_size=4,
        max_response_length=128,
        kl=KL(0.1),
    )
    parts = Parts(transport=transport)
    return train(module, prompts(folder, 256, 8), steps, parts, placement=PLACEMENT)


def differences(ways: dict[str, list[list[Trained]]]) -> list[str]:
    """The names of weights and metrics, rank by rank, that are not the same bits in every run of every way."""
    first, *others = [ranks for runs in ways.values() for ranks in runs]
    names = []
    for ranks in others:
        for number, (one, other) in enumerate(zip(first, ranks, strict=True)):
            names += [
                f"rank {number} {name}" for name in one.weights if not same(one.weights[name], other.weights[name])
            ]
            for step, (a, b) in enumerate(zip(one.metrics, other.metrics, strict=True)):
                a, b = numbers(a), numbers(b)
                names += [f"rank {number} step {step} {name}" for name in a | b if a.get(name) != b.get(name)]
    return names


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


class Direct(Transport):
    """The direct exchange, with a count: `counted_bytes` is the larger of this rank's sent and received bytes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.counted_bytes = 0

    def all_to_all(
        self, send: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], ranks: tuple[int, ...]
    ) -> tuple[Tensor, Work]:
        own = send_sizes[ranks.index(self.rank)]
        self.counted_bytes += send.element_size() * (max(sum(send_sizes), sum(receive_sizes)) - own)
        return super().all_to_all(send, send_sizes, receive_sizes, ranks)


class Hub(Transport):
    """Gathers every message to rank 0, regroups there by receiver, and scatters: as one controller would.

    Attributes:
        counted_bytes: Bytes that this rank sent, or bytes that it received if these are more.
        last_bytes: Bytes that came to the hub and that left it for the last message, those of the hub itself left out.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.counted_bytes = 0
        self.last_bytes = (0, 0)

    def all_to_all(
        self, send: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], ranks: tuple[int, ...]
    ) -> tuple[Tensor, Work]:
        assert ranks[0] == 0, "the hub takes part in every exchange of these runs"
        group = self._groups[ranks]
        sizes = torch.stack(self.all_gather(torch.tensor(send_sizes), ranks))  # [giver, taker]
        sent, received = sizes.sum(dim=1), sizes.sum(dim=0)
        to_hub, from_hub = (send.new_empty(int(total.max())) for total in (sent, received))  # equal parts
        to_hub[: send.numel()] = send
        gathered = [torch.empty_like(to_hub) for _ in ranks] if self.rank == 0 else None
        dist.gather(to_hub, gathered, dst=0, group=group)
        scattered = None
        if gathered is not None:
            messages = [message[: int(total)] for message, total in zip(gathered, sent, strict=True)]
            parts = [message.split(row.tolist()) for message, row in zip(messages, sizes, strict=True)]
            scattered = [torch.empty_like(from_hub) for _ in ranks]
            for taker, message in enumerate(scattered):
                torch.cat([of_giver[taker] for of_giver in parts], out=message[: int(received[taker])])
        dist.scatter(from_hub, scattered, src=0, group=group)
        self.last_bytes = (
            send.element_size() * int(sent.sum() - sent[0]),
            send.element_size() * int(received.sum() - received[0]),
        )
        own = send.element_size() * max(sum(send_sizes), sum(receive_sizes))
        self.counted_bytes += max(self.last_bytes) if self.rank == 0 else own
        return from_hub[: sum(receive_sizes)], Done()


class Done:
    """Nothing is left to wait for."""

    def wait(self) -> None:
        """Return at once."""


WAYS: dict[str, Any] = {"all_to_all": Direct, "hub": Hub}

if __name__ == "__main__":
    main()
