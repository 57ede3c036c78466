"""Runs of tasks, each in a process of one thread; those that are finished are not run again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from benchmarks.learning.runs import ROOT, Task, code


def run_all(tasks: Iterable[Task], jobs: int) -> list[str]:
    """Every seed of every task, what they start from first; a line for each that failed.

    Args:
        tasks: Tasks to run.
        jobs: Runs at a time.
    """
    failed: list[str] = []
    for wave in waves(tasks):
        runs = [(task, seed) for task in wave for seed in task.seeds if not task.finished(seed)]
        with ThreadPoolExecutor(jobs) as pool:
            failed += [line for line in pool.map(lambda run: train(*run), runs) if line is not None]
        if failed:
            break  # what comes after may start from it
    return failed


def waves(tasks: Iterable[Task]) -> list[list[Task]]:
    """The tasks and all that they need, each once, those that are needed in earlier lists."""
    height: dict[Task, int] = {}

    def place(task: Task) -> int:
        if task not in height:
            height[task] = max((place(need) + 1 for need in task.needs), default=0)
        return height[task]

    highest = max((place(task) for task in tasks), default=-1)
    return [[task for task, at in height.items() if at == level] for level in range(highest + 1)]


def train(task: Task, seed: int) -> str | None:
    """One run; None, or what went wrong. What a run left that was stopped is removed."""
    folder = task.folder(seed)
    shutil.rmtree(folder, ignore_errors=True)
    task.marked(seed).unlink(missing_ok=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    marks, started = f"{task.mark(seed)}\n{code()}\n", time.monotonic()
    with folder.with_suffix(".log").open("w", encoding="utf-8") as log:
        command = [sys.executable, *task.command(seed)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
    if ended.returncode:
        return f"{task.name} with seed {seed} ended with {ended.returncode}: see {log.name}"
    task.marked(seed).write_text(marks, encoding="utf-8")
    print(f"{task.name} with seed {seed}: {time.monotonic() - started:.0f} s", flush=True)
    return None
