"""The terminal and the log, in a process of its own, whose streams the console may take."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import ctypes, os, sys
from pathlib import Path
from rlflow.loggers.console import Console

print("before")
with Console(Path(sys.argv[1]), total_steps=2, shows={shows}) as console:
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
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def test_what_libraries_print_goes_to_the_log_and_the_terminal_shows_progress(log: Path) -> None:
    ran = run(log)
    assert ran.stdout.splitlines() == ["before", "step 1/2  reward 0.250  left 0:00", "[saved]", "after"]
    assert ran.stderr == ""
    # Sorted, since Python and C hold lines back as they do for any file.
    expected = ["from C, err", "from C, held back", "from C, out", "from Python", "from a child"]
    assert sorted(log.read_text().splitlines()) == expected


def test_a_rank_that_does_not_show_only_logs(log: Path) -> None:
    assert run(log, shows=False).stdout.splitlines() == ["before", "after"]


def test_an_error_gives_the_terminal_back_before_it_is_told(log: Path) -> None:
    ran = run(log, then="raise SystemExit('`lr` is -1; give a positive number')")
    assert ran.stderr == "`lr` is -1; give a positive number\n"
    assert "lr" not in log.read_text()
    assert ran.returncode == 1


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
    """What comes out of a pseudo-terminal until its other side is closed, which Linux reports as an error."""
    chunks = []
    try:
        while chunk := os.read(descriptor, 4096):
            chunks.append(chunk)
    except OSError:
        pass
    os.close(descriptor)
    return b"".join(chunks).decode()
