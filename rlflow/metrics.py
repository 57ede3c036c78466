"""Metrics of one step: sums and counts of this rank, made one number each by one collective."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from rlflow.data.transport import Transport


class Metrics:
    """What this rank logged since the last reduction: means as sum and count, totals, and largest values."""

    def __init__(self) -> None:
        self._means: dict[str, Tensor] = {}  # [2] float64: sum, count; left on its device until the reduction
        self._sums: dict[str, float] = {}
        self._largest: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def mean(self, name: str, total: Tensor, count: Tensor) -> None:
        """Add 0-dim `total` over `count` entries; the metric is the global total over the global count."""
        entry = torch.stack([total.detach().double(), count.detach().double()])
        self._means[name] = self._means[name] + entry if name in self._means else entry

    def number(self, name: str, value: float) -> None:
        """Add a number that every rank knows alike."""
        self.mean(name, torch.tensor(value, dtype=torch.float64), torch.tensor(1.0))

    def sum(self, name: str, value: float) -> None:
        """Add to the total over ranks and calls, as fits bytes and tokens."""
        self._sums[name] = self._sums.get(name, 0.0) + value

    def largest(self, name: str, value: float) -> None:
        """Keep the largest over ranks and calls, as fits peaks."""
        self._largest[name] = max(value, self._largest.get(name, -math.inf))

    def seconds(self, name: str, value: float) -> None:
        """Add to this rank's total; the metric is the largest total of a rank, as fits times."""
        self._seconds[name] = self._seconds.get(name, 0.0) + value

    def reduce(self, transport: Transport) -> dict[str, float]:
        """The metrics over all ranks, the same on each, sorted by name; starts afresh. One collective.

        Sums are taken in the order of ranks, so two runs give the same bytes. A mean over no entry is left out.
        """
        means_here = {name: entry.tolist() for name, entry in self._means.items()}
        mine = {"means": means_here, "sums": self._sums, "largest": self._largest | self._seconds}
        payload = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
        self._means, self._sums, self._largest, self._seconds = {}, {}, {}, {}
        means: dict[str, list[float]] = {}
        sums: dict[str, float] = {}
        largest: dict[str, float] = {}
        for part in transport.all_gather_ragged(payload):
            theirs = json.loads(part.cpu().numpy().tobytes())
            for name, (total, count) in theirs["means"].items():
                entry = means.setdefault(name, [0.0, 0.0])
                entry[0] += total
                entry[1] += count
            for name, value in theirs["sums"].items():
                sums[name] = sums.get(name, 0.0) + value
            for name, value in theirs["largest"].items():
                largest[name] = max(value, largest.get(name, -math.inf))
        reduced = {name: total / count for name, (total, count) in means.items() if count}
        return dict(sorted((reduced | sums | largest).items()))


def straggler(worked: Sequence[float]) -> dict[str, float]:
    """Who held the others up in a step.

    Args:
        worked: Seconds that each rank worked, by rank, without those in which it waited for others.

    Returns:
        `straggler/rank`, the rank that worked longest, and `straggler/share`, by which share of the median it worked
        longer than that; nothing where there is one rank, or none worked.
    """
    median = statistics.median(worked)
    if len(worked) == 1 or median == 0:
        return {}
    rank = max(range(len(worked)), key=lambda rank: worked[rank])
    return {"straggler/rank": float(rank), "straggler/share": worked[rank] / median - 1}
