"""What this process is doing, written where the process that waits for it reads it: the dead cannot say it themselves.

A process that ends with code 0 may have run to its end, or a reward may have called `os._exit(0)` in it. Who waits for
it learns which of the two from here.
"""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlflow.errors import UserError

SIZE = 512  # bytes
ENDED = "ended"
AT_FIRST = "before its first step"
PARENT_VARIABLE = "RLFLOW_LAUNCHER_PID"  # of a rank that rank 0 started: rank 0's process
FOLDER_VARIABLE = "RLFLOW_STATUS_FOLDER"  # likewise: where each rank has a file for its status
SUPERVISED_VARIABLE = "RLFLOW_SUPERVISED"  # set where another process says how rank 0 ended


class Answered(SystemExit):
    """The command has answered and runs nothing: `--help`."""


class Status:
    """A rank and what it is doing, in memory that two processes share.

    Args:
        memory: `SIZE` bytes.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @classmethod
    def shared(cls) -> Status:
        """Shared with processes that are forked from this one."""
        status = cls(mmap.mmap(-1, SIZE))
        ranks = (os.environ.get(name) for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"))
        status.write(int(next((rank for rank in ranks if rank), "0")), AT_FIRST)
        return status

    @classmethod
    def in_file(cls, path: Path) -> Status:
        """Shared with processes that open the same file; it is made if need be."""
        with path.open("ab+") as file:
            file.truncate(SIZE)
            return cls(mmap.mmap(file.fileno(), SIZE))

    def write(self, rank: int, doing: str) -> None:
        """Replace what is there."""
        text = f"{rank}\n{' '.join(doing.split())}".encode()[:SIZE]
        self._memory[:] = text.ljust(SIZE, b"\0")

    @property
    def rank(self) -> str:
        """Of the process, as text."""
        return self._text().partition("\n")[0] or "0"

    @property
    def doing(self) -> str:
        """Such as `step 1, run rewards: ranks 0-1`."""
        return self._text().partition("\n")[2] or AT_FIRST

    @property
    def ended(self) -> bool:
        """Whether the process has come to its end: its run is done, or it has told on the terminal why it is not."""
        return self.doing == ENDED

    def ending(self, code: int) -> str:
        """How the process ended, and where: `exited with code 0 (step 1, run rewards), before the run came to its end`.

        Args:
            code: Its exit code, or the negative number of the signal that ended it.
        """
        where = "" if self.ended else f" ({self.doing})"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}{where}"
        return f"exited with code {code}{where}" + ("" if self.ended else ", before the run came to its end")

    def _text(self) -> str:
        return self._memory[:].rstrip(b"\0").decode(errors="replace")


def _given() -> Status:
    """The one that rank 0 reads, in a rank that it started."""
    folder = os.environ.pop(FOLDER_VARIABLE, None)
    return Status.shared() if folder is None else Status.in_file(Path(folder) / os.environ["LOCAL_RANK"])


_mine = _given()


def use(status: Status) -> None:
    """From here on, this process writes to `status`."""
    global _mine  # of the process, as its exit code is
    _mine = status


def report(rank: int, doing: str) -> None:
    """Say what this process, a rank of the run, is doing."""
    _mine.write(rank, doing)


def begin() -> None:
    """This process begins a command, and has not come to its end."""
    _mine.write(int(_mine.rank), AT_FIRST)


def end() -> None:
    """This process has come to its end, so that its exit code means what it says."""
    _mine.write(int(_mine.rank), ENDED)


@contextmanager
def refusing_exits() -> Iterator[None]:
    """Code of the user's that ends the process within is an error of theirs: no run is done before its end.

    Raises:
        UserError: It called `sys.exit`.
    """
    try:
        yield
    except Answered:
        raise
    except SystemExit as error:
        raise UserError(
            f"rank {_mine.rank} called `sys.exit({'' if error.code is None else repr(error.code)})` ({_mine.doing}),"
            " before the run came to its end; raise an error in its place"
        ) from error
