"""Metrics of one step: sums and counts of this rank, which ranks reduce to one number for each metric."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rlflow.databuffer.transport import Transport
from rlflow.errors import UserError

Kind = Literal["mean", "sum", "largest", "smallest", "seconds", "worked"]
_COMPARED = ("largest", "smallest", "seconds")  # of ranks; the others are added


class MetricOptions(NamedTuple):
    """Logging and reduction of a metric; each name has one way.

    Attributes:
        kind: Way in which the values of calls and ranks become one number.
        by_module: Whether a module logs it, by `self.log`.
        prog_bar: Whether the terminal shows it.
        logger: Whether loggers, `metrics.jsonl` among them, record it.
    """

    kind: Kind
    by_module: bool = False
    prog_bar: bool = False
    logger: bool = True

    def number(self, total: float, count: float, largest: float) -> float:
        """The metric of all ranks, from the totals of values and counts, and the largest value."""
        if self.kind in _COMPARED:
            return math.nan if math.isnan(count) else -largest if self.kind == "smallest" else largest
        return total / count if self.kind == "mean" else total


MEAN = MetricOptions("mean")
_Entries = Mapping[
    tuple[MetricOptions, str], tuple[float, float]
]  # value and count of each; a count of 0: there is none


@dataclass
class _Entry:
    """A value and a count in float64: numbers from the CPU, and tensors that stay on a device until they are needed."""

    how: MetricOptions
    here: list[float]
    there: list[Tensor | None] = field(default_factory=lambda: [None, None])  # 0-dim each

    def add(self, *entry: Tensor | float) -> None:
        for i, value in enumerate(entry):
            if not isinstance(value, Tensor) or value.device.type == "cpu":
                self.here[i] += float(value)
            else:
                before = self.there[i]
                self.there[i] = value.detach().double() if before is None else before + value.detach()

    def raise_to(self, value: Tensor | float) -> None:
        if not isinstance(value, Tensor) or value.device.type == "cpu":
            self.here[0] = _largest(self.here[0], float(value))
        else:
            value, before = value.detach().double(), self.there[0]
            self.there[0] = value if before is None else torch.maximum(value, before)

    def bring_over(self, i: int, number: float) -> None:
        """Merge the number that was in `there[i]` into `here[i]`."""
        raises = i == 0 and self.how.kind in ("largest", "smallest")
        self.here[i] = _largest(number, self.here[i]) if raises else self.here[i] + number
        self.there[i] = None


def _largest(a: float, b: float) -> float:
    """The larger number; NaN if one is NaN, unlike Python's `max`."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


@dataclass
class StepMetrics:
    """Entries that this rank logged in one step: means as sum and count, totals, and largest values.

    Numbers on a device stay there: the host waits for it once, where they are reduced.

    Example:
        Where one rank logs `mean("actor/kl", 1.0, 4)` and another `mean("actor/kl", 2.0, 2)`, the step's `actor/kl` is
        (1 + 2) / (4 + 2) = 0.5, not the mean of 0.25 and 1.

    Attributes:
        step: Step, from 0.
        logged: Entries by name.
    """

    step: int
    logged: dict[str, _Entry] = field(default_factory=dict)

    def mean(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Add `total` over `count` entries, 0-dim; the metric is the global total over the global count.

        The two may be on different devices.
        """
        self.add(name, MEAN, total, count)

    def number(self, name: str, value: float) -> None:
        """Add a number that every rank knows alike."""
        self.mean(name, value, 1.0)

    def sum(self, name: str, value: Tensor | float) -> None:
        """Add to the total over ranks and calls, as fits bytes and tokens; a tensor is 0-dim."""
        self.add(name, MetricOptions("sum"), value, 1.0)

    def largest(self, name: str, value: Tensor | float) -> None:
        """Keep the largest over ranks and calls, as fits peaks; a tensor is 0-dim."""
        self.add(name, MetricOptions("largest"), value, 1.0)

    def seconds(self, name: str, value: float) -> None:
        """Add to this rank's total; the metric is the largest total of a rank, as fits times."""
        self.add(name, MetricOptions("seconds"), value, 1.0)

    def add(self, name: str, how: MetricOptions, value: Tensor | float, count: Tensor | float) -> None:
        """Add a value, 0-dim, of `count` entries to a metric, in the way `how`; for `smallest` give its negative.

        Raises:
            UserError: The step has logged the name in another way.
        """
        raises = how.kind in ("largest", "smallest")
        entry = self.logged.setdefault(name, _Entry(how, [-math.inf if raises else 0.0, 0.0]))
        if entry.how != how:
            raise in_two_ways(name, entry.how, how)
        if raises:
            entry.raise_to(value)
        entry.add(0.0 if raises else value, count)

    def bring_over(self) -> None:
        """Bring numbers that are on a device to the host, all in one transfer."""
        places = [(entry, i, value) for entry in self.logged.values() for i, value in enumerate(entry.there)]
        waiting = [(entry, i, value) for entry, i, value in places if value is not None]
        numbers = torch.stack([value for *_, value in waiting]).tolist() if waiting else []
        for (entry, i, _), number in zip(waiting, numbers, strict=True):
            entry.bring_over(i, number)

    def entries(self, worked: float | None) -> dict[tuple[MetricOptions, str], tuple[float, float]]:
        """Value and count of each metric as ranks reduce them; a count of 0 means that there is no value."""
        entries = {(entry.how, name): (entry.here[0], entry.here[1]) for name, entry in self.logged.items()}
        return entries if worked is None else entries | {(MetricOptions("worked"), ""): (worked, 1.0)}


def in_two_ways(name: str, one: MetricOptions, other: MetricOptions) -> UserError:
    """The error for a name that is logged in two ways."""
    if one.by_module != other.by_module:
        return UserError(f"`self.log` has the name {name!r}, under which rlflow logs a metric of its own; take another")
    kinds = {"largest": "max", "smallest": "min"}
    ways = [
        f"reduce_fx={kinds.get(how.kind, how.kind)!r}, prog_bar={how.prog_bar}, logger={how.logger}"
        for how in (one, other)
    ]
    return UserError(f"`self.log` has {name!r} with {ways[0]}, and with {ways[1]}; log a name in one way, or take two")


class Metrics:
    """Entries that this rank logged in the steps in progress; there are several if steps overlap.

    Attributes:
        asked: The largest `asks` that any rank gave to the last `reduce`.
    """

    asked = 0

    def __init__(self) -> None:
        self._steps: dict[int, StepMetrics] = {}
        self._known: list[tuple[MetricOptions, str]] = []  # names of all ranks so far, in the same order on each

    def of(self, step: int) -> StepMetrics:
        """The metrics of a step, counted from 0, until they are reduced."""
        return self._steps.setdefault(step, StepMetrics(step))

    def on_bar(self) -> set[str]:
        """Names that any rank logged with `prog_bar`, in any step so far; the same on all ranks."""
        return {name for how, name in self._known if how.prog_bar}

    def off_loggers(self) -> set[str]:
        """Names that any rank logged without `logger`, in any step so far; the same on all ranks."""
        return {name for how, name in self._known if not how.logger}

    def state_dict(self) -> dict[str, Any]:
        """The entries that this rank logged in steps that are not reduced yet, JSON-able."""
        steps = []
        for step, logged in self._steps.items():
            logged.bring_over()
            entries = {name: [[*entry.how], *entry.here] for name, entry in sorted(logged.logged.items())}
            steps.append({"step": step, "entries": entries})
        return {"steps": steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Log the entries that `state_dict` returned; called for each rank's state if this rank gets several."""
        for stored in state["steps"]:
            logged = self.of(stored["step"])
            for name, (how, value, count) in stored["entries"].items():
                logged.add(name, MetricOptions(*how), value, count)

    def reduce(self, step: int, transport: Transport, worked: float | None = None, asks: int = 0) -> dict[str, float]:
        """The step's metrics over all ranks, the same on each, sorted by name; the step's entries are then removed.

        Two reductions of tensors are made. Their size does not depend on the number of ranks, except for one number of
        each rank. The first finds the largest value of every metric, which for a total sets the unit it is counted in.
        The second adds the totals as whole numbers, so that they do not depend on the order of adding and two runs give
        the same bytes. A step in which a rank logs a name for the first time takes three more collectives. A mean, a
        largest or a smallest value over no entry is left out, and a total with an entry that is not finite is NaN.

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
        for (how, name), (total, count), most in rows:
            if how.kind == "worked":
                reduced |= straggler(seconds.tolist()) if count else {}
            elif count:
                reduced[name] = how.number(total, count, most)
        return dict(sorted(reduced.items()))

    def _table(self, mine: _Entries) -> Tensor:
        """`[names, 2]` float64: this rank's value and count of each name that all know."""
        return torch.tensor([mine.get(name, (0.0, 0.0)) for name in self._known], dtype=torch.float64).view(-1, 2)

    def _largest(self, mine: _Entries, transport: Transport, asks: int) -> Tensor:
        """`[names + 1, 2]` float64: over all ranks the largest value, or size of a total, and count.

        The last row has whether a rank has names that are not known to all, and what ranks ask.
        """
        table = self._table(mine)
        are_largest = torch.tensor([how.kind in _COMPARED for how, _ in self._known], dtype=torch.bool)
        values = torch.where(table[:, 1] > 0, table[:, 0], -math.inf)
        unknown = float(not mine.keys() <= set(self._known))
        last = torch.tensor([[unknown, float(asks)]], dtype=torch.float64)
        # A largest value that is NaN makes its count infinite, and the total of counts NaN.
        counts = torch.where(are_largest & values.isnan(), math.inf, table[:, 1])
        rows = torch.stack([torch.where(are_largest, values, table[:, 0].abs()), counts], dim=1)
        return transport.all_reduce(torch.cat([rows.where(~rows.isnan(), math.inf), last]), "max")

    def _totals(
        self, mine: _Entries, largest: Tensor, transport: Transport, worked: float | None
    ) -> tuple[Tensor, Tensor]:
        """Totals of values and counts over all ranks, `[names, 2]` float64, and seconds that each worked, `[ranks]`.

        Args:
            mine: Entries that this rank logged.
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
        """Add the names that any rank logged to the known names; a collective of all ranks.

        Raises:
            UserError: Ranks, or steps, have logged a name in different ways; on all ranks.
        """
        news = [*(mine.keys() - set(self._known))]
        names = {(MetricOptions(*how), name) for of_rank in transport.gather_json(news) for how, name in of_rank}
        self._known = sorted(names.union(self._known))
        ways = dict[str, MetricOptions]()
        for how, name in self._known:
            if ways.setdefault(name, how) != how:
                raise in_two_ways(name, ways[name], how)


def straggler(worked: Sequence[float]) -> dict[str, float]:
    """The rank that the others waited for in a step.

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
