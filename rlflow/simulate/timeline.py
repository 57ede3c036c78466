"""Spans of time on lanes: each starts when its lanes are free and what it needs has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class WorkItem:
    """What is to be done.

    Attributes:
        name: Unique.
        kind: `rollout`, `score`, `train`, `host`, `sync`, `exchange` or `control`.
        lanes: What it occupies: groups of ranks, their links, a controller.
        seconds: How long.
        needs: Names of the work that must have ended.
        nbytes: That it moves in all.
    """

    name: str
    kind: str
    lanes: tuple[str, ...]
    seconds: float
    needs: tuple[str, ...] = ()
    nbytes: float = 0.0


@dataclass(frozen=True)
class WorkSpan:
    """Work and when it is done; `after` is what it waited for last, None where nothing."""

    work: WorkItem
    start: float
    after: str | None

    @property
    def end(self) -> float:
        """When it ends."""
        return self.start + self.work.seconds


@dataclass
class StepTimeline:
    """All spans of a step, in the order in which they were issued."""

    spans: dict[str, WorkSpan] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Of the step."""
        return max((span.end for span in self.spans.values()), default=0.0)

    def critical_path(self) -> list[WorkSpan]:
        """The spans that the step's length is made of, in order: each began when the one before had ended."""
        path: list[WorkSpan] = []
        span = max(self.spans.values(), key=lambda span: span.end, default=None)
        while span is not None:
            path.append(span)
            span = None if span.after is None else self.spans[span.after]
        return path[::-1]


def scheduled(works: Sequence[WorkItem]) -> StepTimeline:
    """The works, one after the other on each lane, in the order given."""
    timeline, last = StepTimeline(), dict[str, str]()
    for work in works:
        before = {*work.needs, *(last[lane] for lane in work.lanes if lane in last)}
        latest = max(before, key=lambda name: timeline.spans[name].end, default=None)
        start = 0.0 if latest is None else timeline.spans[latest].end
        timeline.spans[work.name] = WorkSpan(work, start, latest)
        last |= dict.fromkeys(work.lanes, work.name)
    return timeline
