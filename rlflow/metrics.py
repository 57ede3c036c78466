"""Metrics of one step: sums and counts of this rank, made one number each by one collective."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlflow.data.message import from_message, to_message
from rlflow.data.transport import Transport


@dataclass
class _Logged:
    """Of one step."""

    means: dict[str, Tensor] = field(default_factory=dict)  # [2] float64: sum, count; left on its device
    sums: dict[str, float] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class Metrics:
    """What this rank logged since the last reduction: means as sum and count, totals, and largest values.

    Attributes:
        step: The step that is logged for and reduced; where steps overlap, each has metrics of its own.
    """

    def __init__(self) -> None:
        self.step = 0
        self._steps: defaultdict[int, _Logged] = defaultdict(_Logged)

    def mean(self, name: str, total: Tensor, count: Tensor) -> None:
        """Add 0-dim `total` over `count` entries; the metric is the global total over the global count."""
        entry = torch.stack([total.detach().double(), count.detach().double()])
        means = self._steps[self.step].means
        means[name] = means[name] + entry if name in means else entry

    def number(self, name: str, value: float) -> None:
        """Add a number that every rank knows alike."""
        self.mean(name, torch.tensor(value, dtype=torch.float64), torch.tensor(1.0))

    def sum(self, name: str, value: float) -> None:
        """Add to the total over ranks and calls, as fits bytes and tokens."""
        sums = self._steps[self.step].sums
        sums[name] = sums.get(name, 0.0) + value

    def largest(self, name: str, value: float) -> None:
        """Keep the largest over ranks and calls, as fits peaks."""
        largest = self._steps[self.step].largest
        largest[name] = max(value, largest.get(name, -math.inf))

    def seconds(self, name: str, value: float) -> None:
        """Add to this rank's total; the metric is the largest total of a rank, as fits times."""
        seconds = self._steps[self.step].seconds
        seconds[name] = seconds.get(name, 0.0) + value

    def of_later_steps(self, step: int) -> list[dict[str, Any]]:
        """What this rank logged of steps after `step`, JSON-able: these are under way."""
        return [
            {"step": later, "means": {name: entry.tolist() for name, entry in logged.means.items()}, **_totals(logged)}
            for later, logged in self._steps.items()
            if later > step
        ]

    def log_again(self, later_steps: Sequence[Mapping[str, Any]]) -> None:
        """Log what `of_later_steps` gave."""
        for stored in later_steps:
            self.step = stored["step"]
            for name, (total, count) in stored["means"].items():
                self.mean(name, torch.tensor(total, dtype=torch.float64), torch.tensor(count, dtype=torch.float64))
            for name, value in stored["sums"].items():
                self.sum(name, value)
            for name, value in stored["largest"].items():
                self.largest(name, value)

    def reduce(self, transport: Transport, worked: float | None = None) -> dict[str, float]:
        """The step's metrics over all ranks, the same on each, sorted by name; starts afresh. One collective.

        Sums are taken in the order of ranks, so two runs give the same bytes. A mean over no entry is left out.

        Args:
            transport: To the other ranks.
            worked: Seconds that this rank worked in the step, of which `straggler` is made; None to leave it out.
        """
        here = self._steps.pop(self.step, _Logged())
        means_here = {name: entry.tolist() for name, entry in here.means.items()}
        mine = {"means": means_here, **_totals(here), "worked": worked}
        payload = to_message(json.dumps(mine).encode())
        means: dict[str, list[float]] = {}
        sums: dict[str, float] = {}
        largest: dict[str, float] = {}
        worked_by: list[float] = []
        for part in transport.all_gather_ragged(payload):
            theirs = json.loads(from_message(part))
            worked_by += [] if theirs["worked"] is None else [theirs["worked"]]
            for name, (total, count) in theirs["means"].items():
                entry = means.setdefault(name, [0.0, 0.0])
                entry[0] += total
                entry[1] += count
            for name, value in theirs["sums"].items():
                sums[name] = sums.get(name, 0.0) + value
            for name, value in theirs["largest"].items():
                largest[name] = max(value, largest.get(name, -math.inf))
        reduced = {name: total / count for name, (total, count) in means.items() if count}
        slowest = straggler(worked_by) if worked_by else {}
        return dict(sorted((reduced | sums | largest | slowest).items()))


def _totals(logged: _Logged) -> dict[str, dict[str, float]]:
    return {"sums": logged.sums, "largest": logged.largest | logged.seconds}


def straggler(worked: Sequence[float]) -> dict[str, float]:
    """Who held the others up in a step.

    Args:
        worked: Seconds that each rank worked, by rank, without those in which it waited for others.

    Returns:
        `time/straggler_rank`, the rank that worked longest, and `time/straggler_share`, by which share of the median it
        worked longer than that; nothing where there is one rank, or none worked.
    """
    median = statistics.median(worked)
    if len(worked) == 1 or median == 0:
        return {}
    rank = max(range(len(worked)), key=lambda rank: worked[rank])
    return {"time/straggler_rank": float(rank), "time/straggler_share": worked[rank] / median - 1}
