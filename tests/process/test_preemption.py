"""A process that signals ask to end; real ones, with less patience than a run has."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

BEGIN = """
import sys, time
from rlflow.errors import Preempted
from rlflow.process import preemption

preemption.SAME_S = {same_s}
try:
    with preemption.handled(until_exit=True):
        {begins}
        print("waits", flush=True)
        while not ({until}):
            time.sleep(0.01)
        time.sleep({busy_s})
        print(preemption.received())
except Preempted as error:
    sys.exit(str(error))
"""


@contextlib.contextmanager
def waiting(
    grace_s: float = 60.0,
    same_s: float = 0.1,
    until: str = "False",
    busy_s: float = 0.0,
    begins: bool = True,
    at_hangup: int = signal.SIG_DFL,
) -> Iterator[subprocess.Popen[str]]:
    """A process that handles signals, and waits.

    Args:
        grace_s: Seconds from a signal to its end.
        same_s: Seconds within which signals are one.
        until: What it waits for.
        busy_s: Seconds that it takes after that.
        begins: Whether its run has begun.
        at_hangup: How it was started to take a SIGHUP.
    """
    code = BEGIN.format(
        same_s=same_s, until=until, busy_s=busy_s, begins=f"preemption.begin({grace_s})" if begins else ""
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, at_hangup),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n", process.communicate()
        try:
            yield process
        finally:
            process.kill()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code, and all that it wrote since it waited."""
    written, errors = process.communicate(timeout=300)
    return process.returncode, written + errors


BEFORE = "if anything was saved before, it is still there: continue with `--trainer.ckpt_path last`"


def test_a_second_signal_ends_a_process_before_it_has_saved() -> None:
    with waiting() as process:
        process.terminate()
        time.sleep(0.3)
        process.terminate()
        why = "another SIGTERM came before the state was saved"
        assert ended(process) == (3, f"rlflow: ended by SIGTERM: {why}; {BEFORE}\n")


def test_a_process_ends_when_its_grace_is_over() -> None:
    with waiting(grace_s=0.2) as process:
        process.terminate()
        why = "0.2 s (`trainer.grace_s`) were over before the run had ended"
        assert ended(process) == (3, f"rlflow: ended by SIGTERM: {why}; {BEFORE}\n")


def test_a_signal_before_a_run_has_begun_ends_the_process_immediately() -> None:
    with waiting(begins=False) as process:
        process.terminate()
        code, line = ended(process)
        assert code == 1  # of `sys.exit` with a text; the command ends with 3
        assert line.startswith("ended by SIGTERM: the run had not begun")


def test_a_signal_that_comes_twice_in_a_moment_counts_once() -> None:
    with waiting(same_s=60.0, until="preemption.received()", busy_s=0.3) as process:
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert ended(process) == (0, f"{signal.SIGINT.value}\n")


@pytest.mark.parametrize(
    ("at_hangup", "received", "within_s"), [(signal.SIG_DFL, signal.SIGHUP.value, 60), (signal.SIG_IGN, 0, 0.5)]
)
def test_a_closed_terminal_asks_a_process_to_end_but_not_below_nohup(
    at_hangup: int, received: int, within_s: float
) -> None:
    until = f"preemption.received() or time.monotonic() > {time.monotonic() + within_s}"
    with waiting(until=until, at_hangup=at_hangup) as process:
        process.send_signal(signal.SIGHUP)
        assert ended(process) == (0, f"{received}\n")


def test_a_signal_that_another_rank_received_counts_for_this_rank_too() -> None:
    agrees = f"preemption.agree({signal.SIGTERM.value}) or preemption.received()"
    with waiting(grace_s=0.2, until=agrees, busy_s=20) as process:
        why = "0.2 s (`trainer.grace_s`) were over before the run had ended"
        assert ended(process) == (3, f"rlflow: ended by SIGTERM: {why}; {BEFORE}\n")
