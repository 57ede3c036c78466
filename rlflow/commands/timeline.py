"""What each rank did when, as a run's traces say."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlflow.loggers.trace import FLIGHT, SAVE, TURN, WAIT

# Tasks in which a rank does nothing but wait for the others.
WAITS = {WAIT, "Reduce", "Tell"}
KINDS = {
    "Load": "load",
    "SyncWeights": "weight sync",
    "Tell": "tell",
    "Exchange": "exchange",
    "Reduce": "reduce metrics",
    "Save": "save",
}


@dataclass(frozen=True)
class Span:
    """What a rank did from `start` to `end`, seconds from the run's first span.

    Attributes:
        rank: Who.
        name: A node's id, or what else was done.
        category: Of the trace.
        step: Of the run, from 1.
        start: When it began.
        end: When it ended.
    """

    rank: int
    name: str
    category: str
    step: int
    start: float
    end: float

    def within(self, start: float, end: float) -> float:
        """Its seconds between two times."""
        return max(0.0, min(self.end, end) - max(self.start, start))


@dataclass(frozen=True)
class Timeline:
    """All spans of a run."""

    spans: list[Span]

    @cached_property
    def ranks(self) -> list[int]:
        """All that left a span."""
        return sorted({span.rank for span in self.spans})

    @cached_property
    def steps(self) -> list[int]:
        """All of which there is a span."""
        return sorted({span.step for span in self.spans})

    @cached_property
    def tasks(self) -> list[Span]:
        """Without waits in them, and without those that only repeat others."""
        return [span for span in self.spans if is_task(span)]

    def window(self, steps: Sequence[int]) -> tuple[float, float]:
        """From the beginning of the first task of these steps to the end of the last."""
        of = [span for span in self.tasks if span.step in steps]
        return min(span.start for span in of), max(span.end for span in of)

    def shares(self, rank: int, start: float, end: float) -> tuple[float, float, float]:
        """Of the time between: worked, waited, nothing to do."""
        tasks = sum(span.within(start, end) for span in self.tasks if span.rank == rank)
        waited = sum(span.within(start, end) for span in self.spans if span.rank == rank and span.category in WAITS)
        whole = (end - start) or 1.0
        return (tasks - waited) / whole, waited / whole, 1 - tasks / whole

    def worked(self, step: int) -> list[float]:
        """Seconds that each rank worked in a step, waits not counted, by rank."""
        seconds = dict.fromkeys(self.ranks, 0.0)
        of_step = [span for span in self.spans if span.step == step]
        waits: dict[int, list[Span]] = {rank: [] for rank in self.ranks}
        for span in of_step:
            if span.category == WAIT:
                waits[span.rank].append(span)
        for task in of_step:
            if is_task(task) and task.category not in WAITS:
                inside = [wait for wait in waits[task.rank] if task.start <= wait.start and wait.end <= task.end]
                seconds[task.rank] += task.end - task.start - sum(wait.end - wait.start for wait in inside)
        return list(seconds.values())

    def seconds(self, steps: Sequence[int], of: Callable[[Span], bool]) -> dict[str, dict[int, float]]:
        """A step's mean seconds of spans, by name and rank."""
        found: dict[str, dict[int, float]] = defaultdict(lambda: dict.fromkeys(self.ranks, 0.0))
        for span in self.spans:
            if span.step in steps and of(span):
                found[span.name][span.rank] += (span.end - span.start) / len(steps)
        return dict(found)


def spans(events: Iterable[dict[str, Any]]) -> list[Span]:
    """The spans in a trace's events. A wait is of the step of the task in which it lies, a save of the one before."""
    found: list[Span] = []
    begun: dict[str, float] = {}
    step, waits_until, rank = 1, 0.0, -1
    of_ranks = (event for event in events if "ts" in event and event["cat"] != TURN)
    for event in sorted(of_ranks, key=_by_rank_and_start):
        start, category = event["ts"] / 1e6, event["cat"]
        if event["pid"] != rank:
            rank, waits_until = event["pid"], 0.0
        if event["ph"] == "b":
            begun[event["id"]] = start
            continue
        if event["ph"] == "e":
            if event["id"] in begun:  # else it began before the steps that were read
                found.append(Span(rank, event["name"], category, step, begun.pop(event["id"]), start))
            continue
        end = start + event["dur"] / 1e6
        if category == WAIT and start < waits_until:
            continue  # a part of a wait
        if category in WAITS:
            waits_until = end
        if category not in (WAIT, SAVE):
            step = event["args"]["step"] + 1
        name = event["name"] if category == WAIT else _name(event["name"], category)
        found.append(Span(rank, name, category, step, start, end))
    return found


def is_task(span: Span) -> bool:
    """Whether it is a task of the plan, not a wait within one and not what only repeats others."""
    return span.category not in (WAIT, FLIGHT, "Fill")


def is_wait(span: Span) -> bool:
    """Whether it is a wait for other ranks within a task."""
    return span.category == WAIT


def _by_rank_and_start(event: dict[str, Any]) -> tuple[int, float, float]:
    return event["pid"], event["ts"], -event.get("dur", 0.0)  # what lies in another comes after it


def _name(task: str, category: str) -> str:
    """`run       rewards: ranks 0-1, ...` is `rewards`."""
    if category in KINDS:
        return KINDS[category]
    return task.partition(":")[0].split(maxsplit=1)[1] if category in ("RunNode", "TrainNode") else category
