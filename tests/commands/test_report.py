"""Report on a run's time: the numbers of a trace worked by hand, and the report of a real run on two ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from rlflow import CausalLM, PerSample, UserError, node
from rlflow.cli import main
from rlflow.commands.parser import call
from rlflow.commands.report import Timeline, health, report, sent_bytes, spans
from rlflow.commands.report_charts import in_bytes
from rlflow.commands.trace import trace
from rlflow.loggers.trace import read_events, step_windows, window_of
from rlflow.models.tiny import write_tiny_model
from rlflow.types import WithTexts
from tests.controller.runs import SGD, ZERO2, Fit, MovingGRPO, OddCharacters, RaggedGRPO, fit, sums
from tests.ranks import RankPool

SLOW_S = 1.0


class SlowOnRank1(RaggedGRPO):
    """Rank 1 takes its time to score."""

    @node
    def rewards(self, rollout: WithTexts) -> PerSample:
        time.sleep(SLOW_S * dist.get_rank())
        return super().rewards(rollout)


@pytest.fixture(scope="module")
def folder(ranks2: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    model = write_tiny_model(tmp_path_factory.mktemp("policy") / "policy", hidden_size=64, layers=1, max_position=256)
    module = SlowOnRank1(CausalLM(str(model)), OddCharacters(), group_size=2, max_response_length=4)
    run = Fit(module, sums(16, 4), tmp_path_factory.mktemp("run") / "run", ZERO2, settings={"max_steps": 2})
    ranks2.run(fit, run)
    return run.folder


@pytest.fixture(scope="module")
def printed(folder: Path) -> list[str]:
    """The words of each line of its report."""
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda text: lines.extend(text.splitlines()))
        main(["report", str(folder)])
    return lines


def test_the_report_names_the_slowest_rank_of_each_step(printed: list[str]) -> None:
    named = [line.split()[:4] for line in printed if "worked longest" in line]
    assert named == [["step", "1:", "rank", "1"], ["step", "2:", "rank", "1"]]


def test_the_report_names_the_metrics_outside_their_healthy_range(tmp_path: Path, printed: list[str]) -> None:
    assert any(line.startswith("    time/straggler_share: ") for line in printed)  # rank 1 sleeps
    lines = [{"step": step, "reward/errors": int(step == 2), "rollout/truncated": 0.01 * step} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    count, found, advice = health(tmp_path)
    assert count == "1 metrics are outside their healthy range:"
    assert found == "    reward/errors: 1 (at most); outside in 1 of 3 records"
    assert advice.startswith("        healthy: 0; otherwise: read the warning in `logs/`")


def test_a_run_without_metrics_still_has_a_report_of_its_time(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "traces", tmp_path / "traces")
    report(tmp_path)
    shown = capsys.readouterr().out
    assert "steps 1 to 2 of 2, 2 ranks" in shown
    assert "metrics are not compared with their healthy ranges: " in shown


def test_a_rank_that_waits_for_another_is_seen_to_wait(folder: Path) -> None:
    timeline = timeline_of(folder)
    # Rank 1 comes late to the gather by which all agree on what was scored.
    waits = [span for span in timeline.spans if (span.name, span.category, span.step) == ("gather_bytes", "Wait", 2)]
    early = max((wait for wait in waits if wait.rank == 0), key=lambda wait: wait.end - wait.start)
    assert any(early.start < late.start <= early.end for late in waits if late.rank == 1)
    assert early.end - early.start > SLOW_S / 4  # rank 0 may be late itself, where others use the cores


def test_an_exchange_is_in_progress_from_its_issue_to_its_reader(folder: Path) -> None:
    timeline = timeline_of(folder)
    flights = [span for span in timeline.spans if span.category == "Flight" and span.rank == 0]
    issued = [span for span in timeline.tasks if span.category == "Exchange" and span.rank == 0]
    assert [flight.name for flight in flights] == 2 * ["rollout/balanced2", "advantages/balanced2"]
    for flight, issue in zip(flights, issued, strict=True):
        assert issue.start <= flight.start <= issue.end <= flight.end


def test_the_report_draws_and_leaves_the_traces_with_the_ranks(folder: Path, printed: list[str]) -> None:
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert f"drew {folder / 'timeline.png'}" in printed[-1]
    assert {path.name for path in (folder / "traces").iterdir()} == {"rank0.jsonl", "rank1.jsonl"}


def test_the_report_of_some_steps_is_made_of_their_events(folder: Path, tmp_path: Path) -> None:
    windows = step_windows(folder / "traces")
    every = timeline_of(folder)
    for step in windows:
        window = window_of(windows, [step])
        some = Timeline(spans(read_events(folder / "traces", window=window)))
        assert some.window([step]) == every.window([step])
        assert some.worked(step) == pytest.approx(every.worked(step))
        assert len(some.spans) < len(every.spans)


def test_the_page_has_the_bytes_that_each_edge_of_the_graph_carried(ranks2: RankPool, tmp_path: Path) -> None:
    model = str(write_tiny_model(tmp_path / "policy", hidden_size=64, layers=1, max_position=256))
    module = MovingGRPO(CausalLM(model, optimizer=SGD), OddCharacters(), group_size=6, max_response_length=12)
    moved = ranks2.run(fit, Fit(module, sums(4, prompts_per_step=1), tmp_path / "run", ZERO2))[0].record
    config = {  # as `rlflow fit` leaves it; this run was started from Python
        "module": {
            "class_path": "tests.controller.runs.MovingGRPO",
            "init_args": {"actor": model, "reward": {"class_path": "tests.controller.runs.OddCharacters"}},
        },
        "data": {"train": str(tmp_path / "sums.jsonl")},
        "trainer": {"devices": 2, "accelerator": "cpu"},
        "strategy": {"class_path": "deepspeed"},
        "rollout": {"class_path": "transformers"},
    }
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump(config))
    report(tmp_path / "run", html=True)
    page = (tmp_path / "run/report.html").read_text()
    # The one prompt is loaded on rank 1; the rows that rank 0 trains came to it. Of each row went the ids (8 bytes a
    # token), the mask (1), logprobs (4) and versions (4) of its response, and 8 + 1 + 6 * 8 for the row, as in
    # tests/controller/test_ranks.py; of its advantage one float32.
    rollout = sum(8 * prompt + 17 * response + 57 for prompt, response in moved)
    advantages = 4 * len(moved)
    assert 0 < len(moved) < 6
    carried = re.findall(r'<text class="carried"[^>]*>([^<]*)</text>', page)
    #   batch -> rollout -> rewards -> advantages (which reads the groups too) -> actor_loss
    assert sorted(carried) == sorted([*4 * ["local"], in_bytes(rollout), in_bytes(advantages)])
    assert f"in step 1, {in_bytes(rollout + advantages)} over all edges" in page


def test_bytes_of_exchanges_that_a_filter_repeats_are_added_of_the_step_alone() -> None:
    sent = [event(rank, "exchange  a: b -> c", "Exchange", 0.0, 1.0) for rank in (0, 1, 1)]
    later = event(0, "exchange  a: b -> c", "Exchange", 2.0, 3.0)
    untold = event(0, "exchange  d: e -> f", "Exchange", 0.0, 1.0)  # by a version that did not count them
    for number, each in enumerate([*sent, later], 1):
        each["args"] = {"step": int(each is later), "bytes": 10**number}
    assert sent_bytes([*EVENTS, *sent, later, untold], step=1) == {"exchange  a: b -> c": 10 + 100 + 1000}


def joined(folder: Path, to: Path, *options: str) -> list[dict[str, Any]]:
    main(["trace", str(folder), "--to", str(to), *options])
    events: list[dict[str, Any]] = json.loads(to.read_text())["traceEvents"]
    return events


def test_traces_are_joined_on_demand_of_all_ranks_or_some(folder: Path, tmp_path: Path) -> None:
    assert {event["pid"] for event in joined(folder, tmp_path / "all.json")} == {0, 1}
    assert {event["pid"] for event in joined(folder, tmp_path / "one.json", "--ranks", "[1]")} == {1}


def test_traces_of_some_steps_are_joined(folder: Path, tmp_path: Path) -> None:
    steps = {
        event["args"].get("step")
        for event in joined(folder, tmp_path / "a.json", "--step", "2", "--steps", "1")
        if event.get("cat") == "RunNode"
    }
    assert steps == {1}


def test_a_rank_without_a_trace_cannot_be_joined(folder: Path) -> None:
    with pytest.raises(UserError, match=r"`--ranks` names 7, and there is no .*rank7.jsonl; leave it out"):
        trace(folder, ranks=[7])


def test_ranks_whose_traces_are_on_other_machines_are_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "traces").mkdir()
    shutil.copy(folder / "traces/rank1.jsonl", tmp_path / "traces")
    trace(tmp_path)
    assert "without rank 0: each machine writes the traces of its own ranks" in capsys.readouterr().out
    shutil.copy(folder / "traces/rank0.jsonl", tmp_path / "traces")
    trace(tmp_path)
    assert "without" not in capsys.readouterr().out


def test_a_step_can_be_chosen_and_the_picture_s_place(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["report", str(folder), "--step", "1", "--draw", str(folder / "first.svg")])
    assert capsys.readouterr().out.startswith("step 1 of 2, 2 ranks: ")
    assert "<svg" in (folder / "first.svg").read_text()


def timeline_of(folder: Path) -> Timeline:
    return Timeline(spans(read_events(folder / "traces")))


def event(rank: int, name: str, category: str, start: float, end: float) -> dict[str, Any]:
    times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
    return {"pid": rank, "name": name, "cat": category, "ph": "X", "args": {"step": 0}, **times}


# Rank 0 works 1 s, waits 2 s within a task of 4 s, and then 1 s for the metrics; rank 1 works 5 s and waits 1 s.
EVENTS = [
    event(0, "load      batch: rank 0", "Load", 0.0, 1.0),
    event(0, "run       rewards: ranks 0-1", "RunNode", 1.0, 5.0),
    event(0, "rollout/groups2", "Wait", 2.0, 4.0),
    event(0, "rollout/groups2, a part", "Wait", 2.5, 3.5),
    event(0, "reduce    metrics: ranks 0-1", "Reduce", 5.0, 6.0),
    event(0, "all_gather", "Wait", 5.2, 5.9),
    event(1, "resample  keep: ranks 0-1; repeats", "DynamicSampling", 0.0, 4.0),
    event(1, "run       rewards: ranks 0-1", "RunNode", 0.0, 5.0),
    event(1, "reduce    metrics: ranks 0-1", "Reduce", 5.0, 6.0),
]


def test_waits_are_taken_off_work_and_none_counts_twice() -> None:
    timeline = Timeline(spans(EVENTS))
    assert timeline.worked(1) == pytest.approx([1.0 + 4.0 - 2.0, 5.0])
    assert timeline.shares(0, 0.0, 8.0) == pytest.approx((3 / 8, 3 / 8, 2 / 8))
    assert timeline.shares(1, 0.0, 8.0) == pytest.approx((5 / 8, 1 / 8, 2 / 8))


def test_a_wait_between_tasks_does_not_reduce_their_seconds_of_work() -> None:
    validating = event(0, "broadcast_bytes", "Wait", 6.5, 9.0)
    assert Timeline(spans([*EVENTS, validating])).worked(1) == pytest.approx([1.0 + 4.0 - 2.0, 5.0])


def test_tasks_go_by_the_names_of_their_nodes() -> None:
    seconds = Timeline(spans(EVENTS)).seconds([1], lambda span: span.category not in ("Wait", "DynamicSampling"))
    assert seconds["rewards"] == pytest.approx({0: 4.0, 1: 5.0})
    assert list(seconds) == ["load", "rewards", "reduce metrics"]


def test_a_line_that_a_killed_rank_left_unfinished_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    whole, half = json.dumps(EVENTS[0]), json.dumps(EVENTS[1])[:20]
    (tmp_path / "traces/rank0.jsonl").write_text(f"{whole}\n{half}")
    report(tmp_path)
    assert (tmp_path / "timeline.png").is_file()


@pytest.mark.slow
def test_a_notebook_of_another_environment_can_start_the_command(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces/rank0.jsonl").write_text(f"{json.dumps(EVENTS[0])}\n")
    backend = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}  # which is not installed where rlflow is
    command = [sys.executable, "-m", "rlflow.cli", "report", str(tmp_path)]
    subprocess.run(command, env=os.environ | backend, check=True, capture_output=True, timeout=120)
    assert (tmp_path / "timeline.png").is_file()


@pytest.mark.parametrize("command", ["report", "trace"])
@pytest.mark.parametrize(
    "line", [b"{\n", b"\0\0\n", b"[]\n", b'{"name": "a", "ph": "X", "pid": 0, "ts": 1, "dur": 1}\n']
)
def test_a_damaged_trace_is_one_line(
    tmp_path: Path, line: bytes, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "traces").mkdir()
    file = tmp_path / "traces/rank0.jsonl"
    file.write_bytes(json.dumps(EVENTS[0]).encode() + b"\n" + line)
    with pytest.raises(SystemExit) as ended:
        main([command, str(tmp_path)])
    assert ended.value.code == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert f"{file} is damaged: line 2 is not what a run writes there; remove that line" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--step", "9"], "`--step` is 9, and `.*` has traces of steps 1 to 2"),
        (["--steps", "0"], "`--steps` is 0; give 1 or more"),
        (["--draw", "a.txt"], "`--draw` is 'a.txt'; end it in one of .png"),
    ],
)
def test_what_cannot_be_shown_is_refused(folder: Path, arguments: list[str], told: str) -> None:
    with pytest.raises(UserError, match=told):
        call(report, [str(folder), *arguments])


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no traces/rank"):
        report(tmp_path)
