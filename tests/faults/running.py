"""Runs of `rlflow` as a user starts them: real processes in a folder of their own, ended whatever they do."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from rlflow.process.environment_variables import PLACE

COMMAND = (sys.executable, "-m", "rlflow.cli")
RANK_STARTS_S = 120.0


@dataclass(frozen=True)
class Ended:
    """Result of a command.

    Attributes:
        code: Exit code; negative for the signal that killed it.
        output: Text on standard output.
        errors: Text on standard error.
        seconds: Seconds that it took.
    """

    code: int
    output: str
    errors: str
    seconds: float

    @property
    def last(self) -> str:
        """The last line of its errors."""
        lines = self.errors.strip().splitlines()
        return lines[-1] if lines else ""


class Running:
    """A command that runs. With it ends every process that it has started.

    Args:
        folder: Folder in which it runs; modules in it are found.
        arguments: Arguments after `rlflow`; or a whole command where `command` is given.
        environment: More variables.
        command: Program to start.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        command: tuple[str, ...] = COMMAND,
    ) -> None:
        cleaned = {key: value for key, value in os.environ.items() if key not in (*PLACE, "RANK", "LOCAL_RANK")}
        self._began = time.monotonic()
        self._output, self._errors = folder / "output.txt", folder / "errors.txt"  # a pipe would fill up
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*command, *arguments],
                cwd=folder,
                env={**cleaned, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )

    def ended(self, within: float = 240.0) -> Ended:
        """Wait for its end; it is an error of the test if it does not end.

        Args:
            within: Seconds from its start.
        """
        try:
            code = self.process.wait(max(0.1, within - (time.monotonic() - self._began)))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it still runs after {within:.0f} s\n{self.output}\n{self.errors}") from None
        return Ended(code, self.output, self.errors, time.monotonic() - self._began)

    @property
    def output(self) -> str:
        """So far."""
        return self._output.read_text(errors="replace")

    @property
    def errors(self) -> str:
        """So far."""
        return self._errors.read_text(errors="replace")

    def ranks(self, count: int) -> dict[int, psutil.Process]:
        """The processes of so many ranks that the command started, by rank, when all of them have begun."""
        until = time.monotonic() + RANK_STARTS_S
        while time.monotonic() < until and self.process.poll() is None:
            found = self._ranks()
            if len(found) == count:
                return found
            time.sleep(0.1)
        raise AssertionError(f"{len(self._ranks())} of {count} ranks have begun\n{self.output}\n{self.errors}")

    def processes(self) -> list[psutil.Process]:
        """All that it has started and that runs, itself among them."""
        with contextlib.suppress(psutil.Error):
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        return []

    def _ranks(self) -> dict[int, psutil.Process]:
        """Rank 0 is the child that waits for nobody; the others are its children that have a rank."""
        found = {}
        supervisor = psutil.Process(self.process.pid) if self.process.poll() is None else None
        for first in supervisor.children() if supervisor else ():
            with contextlib.suppress(psutil.Error):
                for child in first.children():
                    rank = child.environ().get("LOCAL_RANK")
                    if rank is not None and child.cmdline()[1:] == first.cmdline()[1 : len(child.cmdline())]:
                        found[int(rank)] = child
                found[0] = first
        return found

    def __enter__(self) -> Running:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def left_over(folder: Path) -> Iterator[list[psutil.Process]]:
    """Around runs in `folder`: after it, the list holds the processes that still run there."""
    found: list[psutil.Process] = []
    yield found
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if Path(process.cwd()).is_relative_to(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)


def fit(folder: Path, *arguments: str, within: float = 240.0, environment: Mapping[str, str] | None = None) -> Ended:
    """`rlflow fit` with these arguments, to its end."""
    with Running(folder, "fit", *arguments, environment=environment) as run:
        return run.ended(within)
