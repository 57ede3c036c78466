"""The end of a process that has nothing left to do; real processes, with half a second of patience."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGIN = """
import atexit, sys, threading, time
from rlflow.process import supervisor as leaving

leaving.EXIT_S = 0.5


def waits():
    time.sleep(1.5)
    print("has waited")


"""


def ended(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BEGIN + code], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize("leaves", ["leaving.leave(5); sys.exit(5)", "sys.exit(5)"])
def test_what_is_registered_for_the_exit_is_done_once_however_long_it_takes(leaves: str) -> None:
    process = ended(f"leaving.before(waits)\n{leaves}\n")
    assert (process.returncode, process.stdout, process.stderr) == (5, "has waited\n", "")


def test_a_thread_that_still_runs_at_the_exit_is_named_and_ended() -> None:
    process = ended("threading.Thread(target=time.sleep, args=(3000,), name='uploads').start()\nleaving.leave(5)\n")
    assert process.returncode == 5
    assert process.stderr.count("\n") == 1
    assert ": thread uploads still ran " in process.stderr


def test_a_thread_that_ends_in_time_is_waited_for() -> None:
    process = ended("leaving.EXIT_S = 30.0\nthreading.Thread(target=waits).start()\nleaving.leave(0)\n")
    assert (process.returncode, process.stdout, process.stderr) == (0, "has waited\n", "")
