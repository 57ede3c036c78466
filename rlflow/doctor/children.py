"""Processes that try something: ended with all that they started when their time is over."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# What a launcher says of a run's place: a trial is a run of its own, on this machine alone.
OF_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_", "LOCAL_", "RANK", "WORLD_SIZE", "NODE_RANK")
GRACE_S = 3.0


@dataclass(frozen=True)
class Tried:
    """What became of a child.

    Attributes:
        code: Its exit code; None where it was ended for its time.
        output: What it printed.
        errors: What it wrote to its standard error.
        seconds: That it took.
    """

    code: int | None
    output: str
    errors: str
    seconds: float

    @property
    def why(self) -> str:
        """The last line of its errors: why it failed."""
        if self.code is None:
            return f"did not end within {self.seconds:.0f} s"
        said = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return said[-1] if said else f"ended with code {self.code} and said nothing"


def tried(
    folder: Path, arguments: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> Tried:
    """Run this Python with other arguments, to its end or for so long.

    Args:
        folder: Where it runs; its output is kept there.
        arguments: Of Python.
        seconds: That it may take.
        environment: More variables.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OF_LAUNCHERS)}
    folder.mkdir(parents=True, exist_ok=True)
    output, errors = folder / "output.txt", folder / "errors.txt"
    began = time.monotonic()
    with output.open("wb") as out, errors.open("wb") as err:
        child = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=kept | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            code: int | None = child.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(child)
    took = time.monotonic() - began
    return Tried(code, output.read_text(errors="replace"), errors.read_text(errors="replace"), took)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child and its session: first by a word, on which a run ends its ranks."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
