"""The terminal and the log, in a process of its own, whose streams the console may take."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlflow.loggers.console import Console, duration

SCRIPT = """
import ctypes, os, sys
from pathlib import Path
from rlflow.loggers.console import open_console

print("before")
with open_console(Path(sys.argv[1]), total_steps=2, shows={shows}) as console:
    print("from Python")
    os.write(1, b"from C, out\\n")
    os.write(2, b"from C, err\\n")
    ctypes.CDLL(None).printf(b"from C, held back\\n")
    os.system("echo from a child")
    console.step(1, {{"reward/mean": 0.25}})
    {then}
    console.say("[saved]")
print("after")
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "rank0.log"


def run(log: Path, then: str = "pass", shows: bool = True) -> subprocess.CompletedProcess[str]:
    script = SCRIPT.format(then=then, shows=shows)
    # Unbuffered, C would hold nothing back.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", script, str(log)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_what_libraries_print_goes_to_the_log_and_the_terminal_shows_progress(log: Path) -> None:
    ran = run(log)
    assert ran.stdout.splitlines() == ["before", "step 1/2  reward 0.250  left 0:00", "[saved]", "after"]
    assert ran.stderr == ""
    # Sorted, since Python and C hold lines back as they do for any file.
    expected = ["from C, err", "from C, held back", "from C, out", "from Python", "from a child"]
    assert sorted(log.read_text().splitlines()) == expected


def test_a_rank_that_does_not_show_only_logs(log: Path) -> None:
    assert run(log, shows=False).stdout.splitlines() == ["before", "after"]


def test_an_error_gives_the_terminal_back_before_it_is_printed(log: Path) -> None:
    ran = run(log, then="raise SystemExit('`lr` is -1; give a positive number')")
    assert ran.stderr == "`lr` is -1; give a positive number\n"
    assert "lr" not in log.read_text()
    assert ran.returncode == 1


def test_a_crash_in_c_leaves_the_stack_in_the_log(log: Path) -> None:
    ran = run(log, then="ctypes.string_at(0)")
    assert (ran.returncode, ran.stderr) == (-signal.SIGSEGV, "")
    assert re.search(r'Segmentation fault\n(.*\n)*  File "<string>", line \d+ in <module>', log.read_text())


def test_a_second_run_appends_to_the_log(log: Path) -> None:
    run(log)
    run(log)
    assert log.read_text().count("from Python") == 2


def test_a_terminal_has_a_bar_that_moves_in_place(log: Path) -> None:
    ours, theirs = pty.openpty()
    script = SCRIPT.format(then='console.step(2, {"reward/mean": 0.5})', shows=True)
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-c", script, str(log)]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        screen = read_all(ours)
    assert process.returncode == 0
    assert "2/2" in screen
    assert "reward 0.500" in screen
    assert "\x1b[2K" in screen  # the escape that clears a line to draw it anew
    assert "[saved]" in screen
    assert "from C" not in screen
    assert screen.rstrip().endswith("after")


def read_all(descriptor: int) -> str:
    """The output of a pseudo-terminal until its other side is closed, which Linux reports as an error."""
    chunks = []
    try:
        while chunk := os.read(descriptor, 4096):
            chunks.append(chunk)
    except OSError:
        pass
    os.close(descriptor)
    return b"".join(chunks).decode()


def shown(*steps: tuple[int, dict[str, float], float], total: int = 10, done: int = 0) -> list[str]:
    terminal = io.StringIO()
    console = Console(terminal, total, done, clock=iter([100.0, *(now for *_, now in steps)]).__next__)
    for step, metrics, _ in steps:
        console.step(step, metrics)
    return terminal.getvalue().splitlines()


def test_a_line_names_step_reward_accuracy_length_rate_and_time_left() -> None:
    metrics = {
        "reward/mean": 0.5124,
        "val/accuracy": 0.43,
        "rollout/length": 12.31,
        "rollout/tokens": 10000.0,
        "time/step": 2.0,
    }
    # 10,000 tokens in 2 s; one step took 2 s, so the other 9 take 18 s.
    assert shown((1, metrics, 102.0)) == [
        "step 1/10  reward 0.512  accuracy 0.430  length 12.3  tokens/s 5,000  step 2 s  left 0:18"
    ]


def test_a_value_stands_in_the_line_of_the_step_that_logged_it() -> None:
    lines = shown((1, {"val/accuracy": 0.25}, 101.0), (2, {}, 102.0), (3, {"val/accuracy": 0.5}, 103.0))
    assert [line.partition("  ")[2] for line in lines] == [
        "accuracy 0.250  left 0:09",
        "left 0:08",
        "accuracy 0.500  left 0:07",
    ]


def test_a_line_names_cut_responses_kl_gradients_and_the_longest_phases() -> None:
    times = {"time/step": 200.0, "time/rollout": 110.0, "time/actor_loss": 62.0, "time/load": 1.0, "time/elapsed": 90.0}
    metrics = {"rollout/truncated": 0.031, "actor/kl": 0.0123, "actor/grad_norm": 2.5, **times}
    assert shown((1, metrics, 102.0)) == [
        "step 1/10  cut 3.1%  kl 0.0123  grad 2.50  step 200 s (rollout 110, actor_loss 62)  left 0:18"
    ]


def test_what_a_run_does_not_log_is_not_shown() -> None:
    assert shown((1, {"actor/value": 0.1}, 101.0)) == ["step 1/10  left 0:09"]


@pytest.mark.parametrize("columns", [40, 60, 100, 160])
def test_the_bar_is_one_line_however_narrow_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    terminal = _Terminal()
    console = Console(terminal, 10, 0)
    metrics = {"reward/mean": 0.5, "val/accuracy": 0.25, "rollout/length": 12.3, "time/step": 2.0, "time/rollout": 1.5}
    console.step(1, metrics)
    console.step(2, {"reward/mean": 0.75})
    console.close()
    screen = terminal.getvalue()
    drawn = re.split(r"[\r\n]", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen))
    last = [line for line in drawn if "2/10" in line][-1]
    assert len(last) <= columns
    assert "left" in last
    if columns >= 100:
        assert "reward 0.750  accuracy 0.250 (step 1)" in last
    assert "\x1b[1A" not in screen  # the escape that goes up a line, as for a bar of two


class _Terminal(io.StringIO):
    """A terminal that can be read."""

    def isatty(self) -> bool:
        return True


def test_a_phase_is_named_only_if_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlflow.loggers.console.PATIENCE_S", 0.05)
    terminal = io.StringIO()
    console = Console(terminal, 10, 0)
    with console.phase("loading models"):
        time.sleep(0.5)
    monkeypatch.setattr("rlflow.loggers.console.PATIENCE_S", 30.0)
    with console.phase("saving"):
        pass
    assert terminal.getvalue() == "loading models ...\n"


def test_a_loss_is_shown_where_nothing_is_sampled() -> None:
    sft = {"actor/loss": 1.25, "val/loss": 2.0}
    assert shown((1, sft, 101.0)) == ["step 1/10  loss 1.250  left 0:09"]
    both = {"actor/loss": 1.25, "value/loss": 0.5}
    assert shown((1, both, 101.0)) == ["step 1/10  actor loss 1.250  value loss 0.500  left 0:09"]
    for sampled in ("reward/mean", "rollout/length"):
        assert "loss" not in shown((1, {"actor/loss": 0.1, sampled: 1.0}, 101.0))[0]


def test_time_before_the_first_step_says_nothing_of_the_pace() -> None:
    terminal = io.StringIO()
    console = Console(terminal, 10, 0, clock=iter([100.0, 160.0, 162.0]).__next__)
    console.begin()  # after a minute of loading
    console.step(1, {})
    assert terminal.getvalue() == "step 1/10  left 0:18\n"


def test_time_left_follows_the_pace_of_recent_steps() -> None:
    # Steps 1 to 10 take 10 s each, 11 to 20 one second each: at 20 of 30, ten steps of one second are left.
    slow = [(step, {}, 100.0 + 10 * step) for step in range(1, 11)]
    fast = [(step, {}, 200.0 + (step - 10)) for step in range(11, 21)]
    assert shown(*slow, *fast, total=30)[-1] == "step 20/30  left 0:10"


def test_steps_of_an_earlier_run_do_not_count_into_the_pace() -> None:
    assert shown((8, {}, 105.0), total=10, done=7) == ["step 8/10  left 0:10"]


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (130, "2:10"), (3723, "1:02:03")])
def test_a_duration_reads_as_on_a_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text
