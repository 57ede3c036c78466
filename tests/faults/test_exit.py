"""Threads and processes that outlive a run, and a terminal that ends before the run."""

from __future__ import annotations

import json
import shlex
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlflow.process.supervisor import EXIT_S
from tests import own_folder
from tests.faults.running import Running, left_over
from tests.own_folder import TWO_RANKS, write

pytestmark = [pytest.mark.row("success means success"), pytest.mark.slow]
REWARDS = """
import asyncio, atexit, multiprocessing, os, threading, time

left = []


def once(function):
    if not left:
        left.append(function)
        function()
    return 1.0


def thread(response, row):
    return once(lambda: threading.Thread(target=time.sleep, args=(3000,), name="uploads").start())


def process(response, row):
    return once(lambda: multiprocessing.Process(target=time.sleep, args=(3000,), name="serves").start())


def at_exit(response, row):
    return once(lambda: atexit.register(time.sleep, 3000))


def thread_on_rank_1(response, row):
    return thread(response, row) if os.environ.get("LOCAL_RANK") == "1" else 1.0


def raises_beside_a_thread(response, row):
    thread(response, row)
    raise KeyError("solution")


def cancelled(response, row):
    raise asyncio.CancelledError
"""


def folder_of(path: Path, function: str, changes: Mapping[str, Any] | None = None, **more: Any) -> Path:
    own_folder.make(path)
    (path / "leaving.py").write_text(REWARDS)
    given = {"function": f"leaving.{function}", **more}
    reward = {"class_path": "rlflow.rewards.CallableReward", "init_args": given}
    write(path / "my.yaml", {"module.init_args.reward": reward, "trainer.max_steps": 1, **(changes or {})})
    return path


@pytest.mark.parametrize(
    ("function", "left", "code"),
    [
        ("thread", "thread uploads", 0),
        ("process", "process serves", 0),
        ("at_exit", "code that runs at exit", 0),
        ("raises_beside_a_thread", "thread uploads", 2),
    ],
)
def test_what_outlives_the_run_is_ended_and_named(
    function: str, left: str, code: int, tmp_path: Path, seen: Callable[[str], None]
) -> None:
    folder = folder_of(tmp_path, function)
    with left_over(tmp_path) as processes, Running(folder, "fit", "--config", "my.yaml") as run:
        ended = run.ended()
    assert ended.code == code, ended
    still = f"rlflow: rank 0 on {socket.gethostname()}: {left} still ran {EXIT_S:.0f} s after all was done"
    assert ended.last.startswith(still), ended
    assert (folder / "runs/own/summary.json").exists() == (code == 0)
    assert processes == []
    seen(f"{function} outlives the run")


def test_rank_0_waits_for_a_rank_that_something_outlives(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "thread_on_rank_1", TWO_RANKS)
    with Running(folder, "fit", "--config", "my.yaml") as run:
        ended = run.ended()
    assert ended.code == 0, ended
    still = [line for line in ended.errors.splitlines() if "still ran" in line]
    assert len(still) == 1, ended
    assert still[0].startswith(f"rlflow: rank 1 on {socket.gethostname()}: thread uploads"), ended


def test_a_cancelled_error_in_a_reward_is_a_failure_too(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "cancelled", on_error="zero")
    with Running(folder, "fit", "--config", "my.yaml") as run:
        ended = run.ended()
    assert ended.code == 0, ended
    (step,) = (json.loads(line) for line in (folder / "runs/own/metrics.jsonl").read_text().splitlines())
    assert step["reward/errors"] > 0


@pytest.mark.parametrize("ending", ["2>&1 | head -1", "> /dev/full 2>&1", ">&- 2>&-"])
def test_a_terminal_that_is_gone_ends_no_run(ending: str, tmp_path: Path) -> None:
    own_folder.make(tmp_path)
    write(tmp_path / "my.yaml", {"trainer.max_steps": 2})
    command = shlex.join([sys.executable, "-m", "rlflow.cli", "fit", "--config", "my.yaml"])
    with Running(tmp_path, "-c", f"({command}; echo $? > code) {ending}", command=("bash",)) as run:
        run.ended()
    assert (tmp_path / "code").read_text() == "0\n", (tmp_path / "errors.txt").read_text()
    assert len((tmp_path / "runs/own/metrics.jsonl").read_text().splitlines()) == 2


def test_an_answer_is_read_as_far_as_its_reader_wants(tmp_path: Path) -> None:
    own_folder.make(tmp_path)
    command = shlex.join([sys.executable, "-m", "rlflow.cli", "graph", "--config", "my.yaml"])
    write(tmp_path / "my.yaml", {})
    with Running(tmp_path, "-c", f"({command}; echo $? > code) | true", command=("bash",)) as run:
        ended = run.ended()
    assert (tmp_path / "code").read_text() == "141\n"
    assert ended.errors == ""
