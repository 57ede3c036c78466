"""What each rank did when: a trace in Chrome's format, which ui.perfetto.dev opens."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlflow.loggers.lines import whole_lines

TRACE_FILE = "trace.json"
MERGED_BYTES = 64 * 2**20  # of the ranks' files together, up to which a run joins them at its end
WAIT, FLIGHT = "Wait", "Flight"  # categories beside those of tasks


class Trace:
    """The spans of one rank, written as they end to `rank<r>.jsonl`.

    So a long run needs no memory for them, and after a hang the last line says what had been done.

    Args:
        folder: Of the run's traces; made if need be.
        rank: Of this process.

    Attributes:
        waited_s: Seconds of all waits so far.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.waited_s = 0.0
        self._rank = rank
        self._flights = 0
        # `perf_counter` starts anywhere, on each machine elsewhere; spans of all ranks share the wall clock.
        self._epoch = time.time() - time.perf_counter()
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"rank{rank}.jsonl").open("w", encoding="utf-8")
        self._write({"name": "process_name", "ph": "M", "args": {"name": f"rank {rank}"}})

    def span(self, name: str, category: str, start: float, end: float, **arguments: Any) -> None:
        """Record what took from `start` to `end`.

        Args:
            name: What was done.
            category: Its kind; Perfetto filters by it.
            start: Of `time.perf_counter`, seconds.
            end: Likewise.
            arguments: JSON-able values shown with the span.
        """
        microseconds = {"ts": (self._epoch + start) * 1e6, "dur": (end - start) * 1e6}
        self._write({"name": name, "cat": category, "ph": "X", **microseconds, "args": arguments})

    def wait(self, name: str, start: float, end: float) -> None:
        """Record that this rank stood still for `name`, in the midst of a task; times as of `span`."""
        self.waited_s += end - start
        self.span(name, WAIT, start, end)

    def flight(self, name: str, start: float, end: float) -> None:
        """Record that `name` was under way, whatever this rank did meanwhile; times as of `span`."""
        self._flights += 1
        for phase, when in (("b", start), ("e", end)):
            event = {"name": name, "cat": FLIGHT, "ph": phase, "id": f"{self._rank}.{self._flights}"}
            self._write({**event, "ts": (self._epoch + when) * 1e6})

    def close(self) -> None:
        """Close the file; no span may follow."""
        self._file.close()

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps({**event, "pid": self._rank, "tid": 0}) + "\n")
        self._file.flush()


def merge_traces(folder: Path) -> Path:
    """Join the files of the ranks in `folder` into its `trace.json`, time 0 being the first span's start.

    Line by line: of many ranks and steps there are more events than memory.
    """
    merged = folder / TRACE_FILE
    with merged.open("w", encoding="utf-8") as file:
        file.write('{"traceEvents": [')
        for number, event in enumerate(_events(folder)):
            file.write((",\n" if number else "") + json.dumps(event))
        file.write("]}")
    return merged


def merge_small_traces(folder: Path, most_bytes: int = MERGED_BYTES) -> None:
    """As `merge_traces`, unless the ranks' files are larger together: no run ends with minutes of joining them."""
    if sum(file.stat().st_size for file in _files(folder)) <= most_bytes:
        merge_traces(folder)


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The events of all ranks in `folder`, rank after rank, in microseconds from the first one's start."""
    return list(_events(folder))


def _events(folder: Path) -> Iterator[dict[str, Any]]:
    start = min((event["ts"] for event in _written(folder) if "ts" in event), default=0.0)
    for event in _written(folder):
        yield {**event, "ts": event["ts"] - start} if "ts" in event else event


def _written(folder: Path) -> Iterator[dict[str, Any]]:
    """The events as the ranks wrote them, without one that a killed rank left unfinished."""
    for file in _files(folder):
        yield from map(json.loads, whole_lines(file))


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("rank*.jsonl"), key=lambda path: int(path.stem.removeprefix("rank")))
