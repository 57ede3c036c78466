"""Metrics of one step: sums and counts of this rank, made one number each of all ranks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from rlflow.databuffer.transport import Transport

Kind = Literal["mean", "sum", "largest", "seconds", "worked"]
_Entries = Mapping[tuple[Kind, str], tuple[float, float]]  # value and count of each; a count of 0: there is none
_EMPTY = {"mean": (0.0, 0.0), "sum": (0.0, 1.0), "largest": (-math.inf, 1.0), "seconds": (0.0, 1.0)}


@dataclass
class _Entry:
    """A value and a count in float64: what came from the CPU, and what stays on its device until the host needs it."""

    here: list[float]
    there: list[Tensor | None] = field(default_factory=lambda: [None, None])  # 0-dim each

    def add(self, *entry: Tensor | float) -> None:
        for i, value in enumerate(entry):
            if not isinstance(value, Tensor) or value.device.type == "cpu":
                self.here[i] += float(value)
            else:
                before = self.there[i]
                self.there[i] = value.detach().double() if before is None else before + value.detach()


@dataclass
class StepMetrics:
    """What this rank logged of one step: means as sum and count, totals, and largest values.

    Numbers on a device stay there: the host waits for it once, where they are reduced.

    Example:
        Where one rank logs `mean("actor/kl", 1.0, 4)` and another `mean("actor/kl", 2.0, 2)`, the step's `actor/kl` is
        (1 + 2) / (4 + 2) = 0.5, not the mean of 0.25 and 1.

    Attributes:
        step: Step, from 0.
        logged: Entries by kind and name.
    """

    step: int
    logged: dict[tuple[Kind, str], _Entry] = field(default_factory=dict)

    def mean(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Add `total` over `count` entries, 0-dim; the metric is the global total over the global count.

        The two may be on different devices.
        """
        self._entry("mean", name).add(total, count)

    def number(self, name: str, value: float) -> None:
        """Add a number that every rank knows alike."""
        self.mean(name, value, 1.0)

    def sum(self, name: str, value: Tensor | float) -> None:
        """Add to the total over ranks and calls, as fits bytes and tokens; a tensor is 0-dim."""
        self._entry("sum", name).add(value)

    def largest(self, name: str, value: Tensor | float) -> None:
        """Keep the largest over ranks and calls, as fits peaks; a tensor is 0-dim."""
        entry = self._entry("largest", name)
        if isinstance(value, Tensor):
            value, before = value.detach().double(), entry.there[0]
            entry.there[0] = value if before is None else torch.maximum(value, before)
        else:
            entry.here[0] = max(value, entry.here[0])

    def seconds(self, name: str, value: float) -> None:
        """Add to this rank's total; the metric is the largest total of a rank, as fits times."""
        self._entry("seconds", name).add(value)

    def of_kind(self, kind: Kind) -> dict[str, list[float]]:
        """Value and count on the host of each metric of a kind, by name."""
        return {name: entry.here for (each, name), entry in self.logged.items() if each == kind}

    def bring_over(self) -> None:
        """Bring what was left on a device to the host, all in one transfer."""
        places = [(kind, entry, i) for (kind, _), entry in self.logged.items() for i in (0, 1)]
        waiting = [(kind, entry, i, value) for kind, entry, i in places if (value := entry.there[i]) is not None]
        numbers = torch.stack([value for *_, value in waiting]).tolist() if waiting else []
        for (kind, entry, i, _), number in zip(waiting, numbers, strict=True):
            entry.here[i] = max(number, entry.here[i]) if kind == "largest" else entry.here[i] + number
            entry.there[i] = None

    def entries(self, worked: float | None) -> dict[tuple[Kind, str], tuple[float, float]]:
        """Value and count of each metric as ranks reduce them, in which a count of 0 says that there is none."""
        entries: dict[tuple[Kind, str], tuple[float, float]] = {}
        for (kind, name), entry in self.logged.items():
            entries["largest" if kind == "seconds" else kind, name] = (entry.here[0], entry.here[1])
        return entries if worked is None else entries | {("worked", ""): (worked, 1.0)}

    def _entry(self, kind: Kind, name: str) -> _Entry:
        return self.logged.setdefault((kind, name), _Entry([*_EMPTY[kind]]))


class Metrics:
    """What this rank logged in the steps in progress; there are several where steps overlap.

    Attributes:
        asked: The largest `asks` that any rank gave to the last `reduce`.
    """

    asked = 0

    def __init__(self) -> None:
        self._steps: dict[int, StepMetrics] = {}
        self._known: list[tuple[Kind, str]] = []  # names of all ranks so far, in the same order on each

    def of(self, step: int) -> StepMetrics:
        """Those of a step, counted from 0, until they are reduced."""
        return self._steps.setdefault(step, StepMetrics(step))

    def state_dict(self) -> dict[str, Any]:
        """What this rank logged of steps that are not reduced yet, JSON-able."""
        steps = []
        for step, logged in self._steps.items():
            logged.bring_over()
            kinds: dict[str, Kind] = {"sums": "sum", "largest": "largest", "seconds": "seconds"}
            rest = {key: {name: x for name, (x, _) in logged.of_kind(kind).items()} for key, kind in kinds.items()}
            steps.append({"step": step, "means": logged.of_kind("mean"), **rest})
        return {"steps": steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Log what `state_dict` gave; one after another of several ranks."""
        for stored in state["steps"]:
            logged = self.of(stored["step"])
            for name, (total, count) in stored["means"].items():
                logged.mean(name, total, count)
            for name, value in stored["sums"].items():
                logged.sum(name, value)
            for name, value in stored["largest"].items():
                logged.largest(name, value)
            for name, value in stored["seconds"].items():
                logged.seconds(name, value)

    def reduce(self, step: int, transport: Transport, worked: float | None = None, asks: int = 0) -> dict[str, float]:
        """The step's metrics over all ranks, the same on each, sorted by name; starts afresh.

        Two reductions of tensors are made. Their size does not depend on the number of ranks, except for one number of
        each rank. The first finds the largest value of every metric, which for a total sets the unit it is counted in.
        The second adds the totals as whole numbers, so that they do not depend on the order of adding and two runs give
        the same bytes. A step in which a rank logs a name for the first time takes three more collectives. A mean over
        no entry is left out, and a total with an entry that is not finite is NaN.

        Args:
            step: Step whose metrics are reduced, and then dropped.
            transport: Transport to the other ranks.
            worked: Seconds that this rank worked in the step, from which `straggler` is computed; None to leave it out.
            asks: A number from 0 that travels with them: the signal by which this rank was asked to end.
        """
        here = self._steps.pop(step, StepMetrics(step))
        here.bring_over()
        mine = here.entries(worked)
        largest = self._largest(mine, transport, asks)
        if largest[-1, 0]:
            self._learn_names(mine, transport)
            largest = self._largest(mine, transport, asks)
        self.asked = int(largest[-1, 1])
        totals, seconds = self._totals(mine, largest[:-1], transport, worked)
        reduced: dict[str, float] = {}
        rows = zip(self._known, totals.tolist(), largest[:, 0].tolist(), strict=False)
        for (kind, name), (total, count), most in rows:
            if kind == "worked":
                reduced |= straggler(seconds.tolist()) if count else {}
            elif count:
                reduced[name] = {"mean": total / count, "sum": total, "largest": most}[kind]
        return dict(sorted(reduced.items()))

    def _table(self, mine: _Entries) -> Tensor:
        """`[names, 2]` float64: this rank's value and count of each name that all know."""
        return torch.tensor([mine.get(name, (0.0, 0.0)) for name in self._known], dtype=torch.float64).view(-1, 2)

    def _largest(self, mine: _Entries, transport: Transport, asks: int) -> Tensor:
        """`[names + 1, 2]` float64: over all ranks the largest value, or size of a total, and count.

        The last row has whether a rank has names that are not known to all, and what ranks ask.
        """
        table = self._table(mine)
        are_largest = torch.tensor([kind == "largest" for kind, _ in self._known], dtype=torch.bool)
        values = torch.where(table[:, 1] > 0, table[:, 0], -math.inf)
        unknown = float(not mine.keys() <= set(self._known))
        last = torch.tensor([[unknown, float(asks)]], dtype=torch.float64)
        rows = torch.stack([torch.where(are_largest, values, table[:, 0].abs()), table[:, 1]], dim=1)
        return transport.all_reduce(torch.cat([rows.where(~rows.isnan(), math.inf), last]), "max")

    def _totals(
        self, mine: _Entries, largest: Tensor, transport: Transport, worked: float | None
    ) -> tuple[Tensor, Tensor]:
        """Totals of values and counts over all ranks, `[names, 2]` float64, and seconds that each worked, `[ranks]`.

        Args:
            mine: What this rank logged.
            largest: `[names, 2]`, over all ranks.
            transport: Transport to the other ranks.
            worked: See `reduce`.
        """
        finite = largest.isfinite()
        # So fine that the totals just fit into 63 bits: beyond what a float64 holds, for up to 512 ranks.
        bits = 62 - (transport.world_size - 1).bit_length()
        exponents = torch.frexp(largest.where(finite, 1.0)).exponent.clamp(min=-900)
        unit = torch.exp2(exponents.double() - bits)
        counted = torch.where(finite, self._table(mine) / unit, 0.0).round().long()
        nanoseconds = torch.zeros(transport.world_size, dtype=torch.int64)
        nanoseconds[transport.rank] = round((worked or 0.0) * 1e9)
        totals = transport.all_reduce(torch.cat([counted.flatten(), nanoseconds]), "sum")
        counted, nanoseconds = totals.split([largest.numel(), transport.world_size])
        return torch.where(finite, counted.view(-1, 2) * unit, math.nan), nanoseconds / 1e9

    def _learn_names(self, mine: _Entries, transport: Transport) -> None:
        """Know what every rank logged; a collective of all ranks."""
        news = [*(mine.keys() - set(self._known))]
        names = {(kind, name) for of_rank in transport.gather_json(news) for kind, name in of_rank}
        self._known = sorted(names.union(self._known))


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
