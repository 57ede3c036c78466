"""A long run grows in nothing: memory, files, threads, processes, logs, traces; a killed run leaves nothing behind."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlflow.callbacks import Callback
from rlflow.loggers import trace as traces
from rlflow.loggers.console import LogLimit
from rlflow.loggers.trace import Trace, read_events, step_windows
from rlflow.models.tiny import write_tiny_model
from tests import own_folder
from tests.controller.runs import Fit, grpo, sums
from tests.controller.runs import fit as controlled_fit
from tests.faults.running import Running, fit

pytestmark = pytest.mark.row("leaks")
Seen = Callable[[str], None]

WARM_UP, STEPS = 800, 2000
MOST_BYTES_A_STEP = 2000
KILLS = 20
# Dies with the process that waits for it, or alone, and leaves a file in the folder for temporary ones.
DIES = """
import os, signal, sys, tempfile
from rlflow.process.scratch import scratch_folder
from rlflow.process.supervisor import supervise

supervise()
open(os.path.join(tempfile.mkdtemp(dir=scratch_folder()), "model"), "w").close()
for process in {killed}:
    os.kill(process, signal.SIGKILL)
"""


def test_a_trace_keeps_the_last_steps_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: Seen) -> None:
    monkeypatch.setattr(traces, "MOST_BYTES", most := 100_000)
    trace, steps = Trace(tmp_path, rank=0), 5000
    for step in range(steps):
        trace.span("run rewards", "RunNode", step, step + 0.5, step=step)
    trace.close()
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert size < 1.1 * most
    windows = step_windows(tmp_path)
    assert list(windows) == list(range(min(windows), steps + 1))  # the last ones, none between them missing
    assert size > 0.4 * most
    names = [event["name"] for event in read_events(tmp_path) if event["ph"] == "M"]
    assert set(names) == {"process_name"}
    seen(f"a trace of {steps} steps: {size / most:.2f} of its limit")


def test_a_log_keeps_its_beginning_and_its_end(tmp_path: Path, seen: Seen) -> None:
    log, most = tmp_path / "rank0.log", 100_000
    with log.open("ab", buffering=0) as file:
        file.write(b"first\n")
        limit = LogLimit(log, most)
        for number in range(20):
            file.write(b"x" * most)
            file.write(f"line {number}\n".encode())
            limit._look()
        limit.close()
    written = log.read_bytes()
    assert len(written) < most
    assert written.startswith(b"first\n")
    assert written.endswith(b"line 19\n")
    assert b"bytes of the log are left out here" in written
    seen(f"a log of {20 * most:,} bytes: {len(written):,}")


def test_temporary_files_of_a_run_that_was_killed_are_removed(tmp_path: Path) -> None:
    """By the process that waits for it; where that was killed too, by the next run."""

    def run(text: str) -> int:
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        return subprocess.run([sys.executable, "-c", text], env=environment, timeout=300, check=False).returncode

    assert run(DIES.format(killed="[os.getpid()]")) == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
    assert run(DIES.format(killed="[os.getppid(), os.getpid()]")) == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    os.utime(left, (0, 0))  # a run takes one that is new for one that begins
    assert run("import os; from rlflow.process.scratch import make_scratch; os.rmdir(make_scratch())") == 0
    assert list(tmp_path.iterdir()) == []


class Counts(Callback):
    """Counts what this process holds after some steps: objects of Python, files and threads."""

    def __init__(self, steps: tuple[int, ...]) -> None:
        self.steps = steps
        self.held: list[tuple[int, int, int]] = []

    def on_step_end(self, trainer: Any, module: Any, step: int, metrics: Any) -> None:
        if step in self.steps:
            gc.collect()
            process = psutil.Process()
            self.held.append((len(gc.get_objects()), process.num_fds(), process.num_threads()))


def test_a_step_leaves_no_object_file_or_thread(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "layers": 1, "max_position": 256}
    policy = write_tiny_model(tmp_path / "policy", **sizes)  # type: ignore[arg-type]
    counts = Counts((8, 16))
    settings = {"max_steps": 16, "callbacks": [counts]}
    controlled_fit(Fit(grpo(policy, max_response_length=4), sums(8, 2), tmp_path / "run", settings=settings))
    (objects, *before), (objects_later, *later) = counts.held
    assert objects_later - objects < 16 - 8  # less than one a step
    assert later == before


@pytest.mark.slow
def test_a_long_run_grows_in_nothing(tmp_path: Path, seen: Seen) -> None:
    own_folder.make(tmp_path)
    shutil.copy(Path(__file__).with_name("leaking.py"), tmp_path)
    own_folder.write(
        tmp_path / "my.yaml",
        {
            "trainer.max_steps": WARM_UP + STEPS,
            "callbacks": [{"class_path": "leaking.Measures"}],
            "module.init_args.actor.optimizer": {"lr": 1e-3},
        },
    )
    ended = fit(tmp_path, "--config", "my.yaml", within=590.0)
    assert ended.code == 0, ended.errors
    held = [json.loads(line) for line in (tmp_path / "held0.jsonl").read_text().splitlines()]
    after = [each for each in held if each["step"] >= WARM_UP]
    assert (after[0]["step"], after[-1]["step"]) == (WARM_UP, WARM_UP + STEPS)
    grown = (after[-1]["memory"] - after[0]["memory"]) / STEPS
    assert grown < MOST_BYTES_A_STEP, held
    for what in ("files", "threads", "processes"):
        assert len({each[what] for each in after}) == 1, [each[what] for each in after]
    seen(f"{STEPS:,} steps: {grown / 1000:.2f} kB a step, {after[-1]['files']} files, {after[-1]['threads']} threads")


@pytest.mark.slow
def test_runs_that_are_killed_leave_nothing_in_the_folder_for_temporary_files(tmp_path: Path, seen: Seen) -> None:
    own_folder.make(tmp_path)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    at_steps = 0
    for kill in range(KILLS):
        with Running(
            tmp_path,
            "fit",
            "--config",
            "my.yaml",
            "--trainer.max_steps",
            "100000",
            environment={"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")},
        ) as run:
            rank = run.ranks(1)[0]
            while kill % 2 and "step 1/" not in run.output:  # every other one in its steps
                assert rank.is_running(), run.errors
                time.sleep(0.05)
            time.sleep(0.1 * kill)
            at_steps += "step 1/" in run.output
            rank.kill()
            ended = run.ended()
        assert ended.code != 0
    assert [path.name for path in temporary.iterdir()] == []
    assert at_steps >= KILLS // 2
    seen(f"{KILLS} kills, {at_steps} of them in steps: nothing left")
