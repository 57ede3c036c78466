"""The trace that Perfetto opens."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from rlflow.loggers.trace import TRACE_FILE, Trace, merge_traces, step_windows


@pytest.fixture
def events(tmp_path: Path) -> list[dict[str, Any]]:
    """The merged events of ranks 0 and 10, rank 10 starting a quarter of a second later."""
    now = time.perf_counter()
    for rank, start in ((0, now), (10, now + 0.25)):
        trace = Trace(tmp_path / "traces", rank, ranks=11)
        trace.span("node rewards", "RunNode", start, start + 0.5, step=3)
        trace.close()
    merged: dict[str, Any] = json.loads(merge_traces(tmp_path / "traces").read_text())
    assert list(merged) == ["traceEvents"]
    return list(merged["traceEvents"])


def test_a_span_has_the_fields_of_a_complete_event(events: list[dict[str, Any]]) -> None:
    span = events[1]
    assert (span["name"], span["cat"], span["ph"], span["args"]) == ("node rewards", "RunNode", "X", {"step": 3})
    assert (span["ts"], span["dur"]) == (0.0, pytest.approx(0.5e6))  # microseconds


def test_each_rank_is_a_process_with_a_name(events: list[dict[str, Any]]) -> None:
    assert [(event["pid"], event["args"]) for event in events if event["ph"] == "M"] == [
        (0, {"name": "rank 0", "ranks": 11}),
        (10, {"name": "rank 10", "ranks": 11}),
    ]


def test_spans_are_on_the_wall_clock_which_machines_share(tmp_path: Path) -> None:
    start = time.perf_counter()
    trace = Trace(tmp_path, 0)
    trace.span("load batch", "Load", start, start)
    span = json.loads((tmp_path / "rank0.jsonl").read_text().splitlines()[-1])
    assert span["ts"] / 1e6 == pytest.approx(time.time(), abs=60)  # `perf_counter` itself is years away


def test_a_later_rank_starts_later(events: list[dict[str, Any]]) -> None:
    # The two epochs are read a moment apart; 10 ms is far below the quarter second between the spans.
    first, second = (event["ts"] for event in events if event["ph"] == "X")
    assert second - first == pytest.approx(0.25e6, abs=1e4)


def test_a_span_is_on_disk_before_the_run_ends(tmp_path: Path) -> None:
    trace = Trace(tmp_path, 0)  # kept, since Python closes the file of one that is let go
    trace.span("load batch", "Load", 0.0, 1.0)
    assert json.loads((tmp_path / "rank0.jsonl").read_text().splitlines()[-1])["name"] == "load batch"


def test_waits_are_summed_and_flights_begin_and_end(tmp_path: Path) -> None:
    trace = Trace(tmp_path, 0)
    trace.wait("rollout/groups2", 1.0, 1.5)
    trace.wait("rewards/groups2", 2.0, 2.25)
    trace.flight("rollout/groups2", 0.5, 1.5)
    written = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    assert trace.waited_s == 0.75
    assert [event["cat"] for event in written[1:]] == ["Wait", "Wait", "Flight", "Flight"]
    assert [event["ph"] for event in written[3:]] == ["b", "e"]
    assert written[4]["ts"] - written[3]["ts"] == pytest.approx(1e6, abs=1)
    assert written[3]["id"] == written[4]["id"]


def test_turns_of_a_conversation_have_a_row_of_their_own_and_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlflow.loggers.trace.MOST_TURNS", 3)
    trace = Trace(tmp_path, 0)
    trace.span("run rollout", "RunNode", 0.5, 3.0, step=0)
    for start, (of, conversation) in enumerate([("policy", 0), ("policy", 4), ("environment", 4), ("policy", 4)]):
        trace.turn(of, conversation, start, start + 0.5, step=0)
    events = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    named = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert named == {1: "conversation 0", 5: "conversation 4"}
    turns = [event for event in events if event.get("cat") == "Turn"]
    assert [(event["name"], event["tid"], event["dur"]) for event in turns] == [
        ("policy", 1, pytest.approx(5e5)),
        ("policy", 5, pytest.approx(5e5)),
        ("environment", 5, pytest.approx(5e5)),
    ]
    first, last = step_windows(tmp_path)[1]
    assert last - first == pytest.approx(2.5e6), "the step is that of its tasks"


def _of_ranks(folder: Path, ranks: int, spans: int) -> None:
    for rank in range(ranks):
        trace = Trace(folder, rank)
        for number in range(spans):
            trace.span("node rewards", "RunNode", number, number + 0.5, step=number)
        trace.close()


def test_joining_the_ranks_takes_no_memory_for_their_events(tmp_path: Path) -> None:
    _of_ranks(tmp_path, ranks=4, spans=2000)  # 8,000 events, about 6 MB as objects
    tracemalloc.start()
    merge_traces(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
    assert len(json.loads((tmp_path / TRACE_FILE).read_text())["traceEvents"]) == 4 * 2001


def test_a_run_on_fewer_ranks_removes_the_traces_of_the_others(tmp_path: Path) -> None:
    _of_ranks(tmp_path, ranks=4, spans=1)
    (tmp_path / "rank3.earlier.jsonl").touch()
    Trace(tmp_path, 0, ranks=2).close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank0.jsonl", "rank1.jsonl"]


def test_a_trace_of_no_event_is_joined_too(tmp_path: Path) -> None:
    assert json.loads(merge_traces(tmp_path).read_text()) == {"traceEvents": []}
