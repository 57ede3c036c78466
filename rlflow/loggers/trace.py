"""The trace of each rank's work over time, in Chrome's format, which ui.perfetto.dev opens."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlflow.loggers.lines import json_lines

TRACE_FILE = "trace.json"
WAIT, FLIGHT = "Wait", "Flight"  # categories in addition to those of tasks
TURN = "Turn"  # of a conversation, within the task of a node
MOST_TURNS = 100_000  # in a run, on a rank: some 25 MB
MOST_BYTES = 64 * 2**20  # of a rank, in two files: some 15,000 steps; those before them are dropped
SAVE = "Save"  # a task that runs after the step that it saves
Window = tuple[float, float]  # from and to, microseconds of the wall clock


class Trace:
    """The spans of one rank, written as they end to `rank<r>.jsonl`.

    So a long run needs no memory for them, and after a hang the last line says what had been done. When the file has
    half of `MOST_BYTES` it becomes `rank<r>.earlier.jsonl`, in place of the one before: the last steps are there.

    A span is a line such as `{"tid": 0, "name": "run       rewards: ranks 0-1", "cat": "RunNode", "ph": "X", "ts":
    1.7e15, "dur": 2500.0, "args": {"step": 0}, "pid": 1}`: 2.5 ms of rank 1, in microseconds of the wall clock.

    Args:
        folder: Folder of the run's traces; created if it does not exist.
        rank: Rank of this process.
        ranks: Number of ranks of the run.

    Attributes:
        waited_s: Seconds of all waits so far.
    """

    def __init__(self, folder: Path, rank: int, ranks: int = 1) -> None:
        self.waited_s = 0.0
        self._rank = rank
        self._flights = 0
        self._turns = 0
        self._conversations: set[int] = set()
        # `perf_counter` starts anywhere, on each machine elsewhere; spans of all ranks share the wall clock.
        self._epoch = time.time() - time.perf_counter()
        self._ranks = ranks
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"rank{rank}.jsonl"
        _earlier(self._path).unlink(missing_ok=True)
        for file in _files(folder) if rank == 0 else ():
            if _rank(file) >= ranks:  # of a run of more ranks that was resumed
                file.unlink()
        self._begin()

    def span(self, name: str, category: str, start: float, end: float, **arguments: Any) -> None:
        """Record a piece of work from `start` to `end`.

        Args:
            name: Name of the work, shown on the span.
            category: Kind of work; Perfetto filters by it.
            start: Start, in seconds of `time.perf_counter`.
            end: End, in seconds of `time.perf_counter`.
            arguments: JSON-able values shown with the span.
        """
        microseconds = {"ts": (self._epoch + start) * 1e6, "dur": (end - start) * 1e6}
        self._write({"name": name, "cat": category, "ph": "X", **microseconds, "args": arguments})

    def wait(self, name: str, start: float, end: float) -> None:
        """Record that this rank waited for `name` within a task; times as in `span`."""
        self.waited_s += end - start
        self.span(name, WAIT, start, end)

    def flight(self, name: str, start: float, end: float) -> None:
        """Record that `name` was in progress while this rank did other work; times as in `span`."""
        self._flights += 1
        for phase, when in (("b", start), ("e", end)):
            event = {"name": name, "cat": FLIGHT, "ph": phase, "id": f"{self._rank}.{self._flights}"}
            self._write({**event, "ts": (self._epoch + when) * 1e6})

    def turn(self, of: str, conversation: int, start: float, end: float, **arguments: Any) -> None:
        """Record that a conversation waited for `of`, its policy or environment; times as in `span`.

        Each conversation has a row of its own, from one run of a node to the next.
        A long run has more of them than anyone looks at: after `MOST_TURNS` no further ones are recorded.
        """
        self._turns += 1
        if self._turns > MOST_TURNS:
            return
        row = {"tid": 1 + conversation}
        if conversation not in self._conversations:
            self._conversations.add(conversation)
            self._write({"name": "thread_name", "ph": "M", "args": {"name": f"conversation {conversation}"}, **row})
        microseconds = {"ts": (self._epoch + start) * 1e6, "dur": (end - start) * 1e6}
        self._write({"name": of, "cat": TURN, "ph": "X", **microseconds, "args": arguments, **row})

    def close(self) -> None:
        """Close the file; no span may follow."""
        self._file.close()

    def _begin(self) -> None:
        self._written = 0
        self._conversations.clear()  # named once in each file
        self._file = self._path.open("w", encoding="utf-8")
        self._write({"name": "process_name", "ph": "M", "args": {"name": f"rank {self._rank}", "ranks": self._ranks}})

    def _write(self, event: dict[str, Any]) -> None:
        if self._written > MOST_BYTES // 2:
            self._file.close()
            self._path.replace(_earlier(self._path))
            self._begin()
        self._written += self._file.write(json.dumps({"tid": 0, **event, "pid": self._rank}) + "\n")
        self._file.flush()


def _earlier(path: Path) -> Path:
    return path.with_suffix(".earlier.jsonl")


def merge_traces(
    folder: Path, to: Path | None = None, ranks: Collection[int] | None = None, window: Window | None = None
) -> Path:
    """Join the files of the ranks in `folder`, time 0 being the first span's start.

    Line by line, since the events of many ranks and steps may not fit into memory.

    Args:
        folder: Folder of a run's traces.
        to: The file; `trace.json` in the folder where None.
        ranks: Ranks whose events are taken; None for all.
        window: Time in which they are; None for any time.
    """
    merged = to or folder / TRACE_FILE
    merged.parent.mkdir(parents=True, exist_ok=True)
    with merged.open("w", encoding="utf-8") as file:
        file.write('{"traceEvents": [')
        for number, event in enumerate(read_events(folder, ranks, window)):
            file.write((",\n" if number else "") + json.dumps(event))
        file.write("]}")
    return merged


def read_events(
    folder: Path, ranks: Collection[int] | None = None, window: Window | None = None
) -> Iterator[dict[str, Any]]:
    """The events of the ranks in `folder`, rank after rank, in microseconds from the first one's start.

    Args:
        folder: Folder of a run's traces.
        ranks: Ranks whose events are read; None for all.
        window: Time in which they are, as `window_of` returns it; None for any time.
    """
    start = min((event["ts"] for event in _written(folder) if "ts" in event), default=0.0)
    for event in _written(folder, ranks):
        if "ts" not in event:
            yield event
        elif window is None or (event["ts"] < window[1] and event["ts"] + event.get("dur", 0.0) >= window[0]):
            yield {**event, "ts": event["ts"] - start}


def step_windows(folder: Path) -> dict[int, Window]:
    """Beginning and end of the tasks of each step, over all ranks, by step from 1: microseconds of the wall clock."""
    windows: dict[int, Window] = {}
    for event in _written(folder):
        if event.get("cat") in (None, WAIT, FLIGHT, TURN):
            continue
        step = event["args"]["step"] + (event["cat"] != SAVE)
        start, end = event["ts"], event["ts"] + event["dur"]
        first, last = windows.get(step, (start, end))
        windows[step] = min(first, start), max(last, end)
    return dict(sorted(windows.items()))


def window_of(windows: Mapping[int, Window], steps: Sequence[int]) -> Window:
    """Time from the beginning of the first of `steps` to the end of the last."""
    return min(windows[step][0] for step in steps), max(windows[step][1] for step in steps)


def missing_ranks(folder: Path) -> list[int]:
    """The run's ranks that have no file in `folder`, because their machine has other storage."""
    here = {_rank(file) for file in _files(folder)}
    first = (next(json_lines(file, _is_event), None) for file in _files(folder))
    ranks = max((event["args"].get("ranks", 0) for event in first if event), default=0)
    return [rank for rank in range(ranks) if rank not in here]


def _written(folder: Path, ranks: Collection[int] | None = None) -> Iterator[dict[str, Any]]:
    """The events as the ranks wrote them, without one that a killed rank left unfinished."""
    for file in _files(folder):
        if ranks is None or _rank(file) in ranks:
            yield from json_lines(file, _is_event)


def _is_event(found: Any) -> bool:
    """Whether an event has all the entries that are read from its kind."""
    if not isinstance(found, dict) or not {"name", "ph", "pid"} <= found.keys():
        return False
    times = [found[name] for name in ("ts", "dur") if name in found]
    arguments = found.get("args", {})
    task = found["ph"] == "X" and found.get("cat") not in (WAIT, TURN)
    return (
        len(times) == {"X": 2, "b": 1, "e": 1, "M": 0}.get(found["ph"])
        and all(type(time) in (int, float) for time in times)
        and isinstance(arguments, dict)
        and (not task or type(arguments.get("step")) is int)
    )


def _files(folder: Path) -> list[Path]:
    """The files of all ranks; for each rank, the one written earlier first."""
    return sorted(folder.glob("rank*.jsonl"), key=lambda file: (_rank(file), not file.stem.endswith(".earlier")))


def _rank(file: Path) -> int:
    return int(file.name.split(".")[0].removeprefix("rank"))
