"""The status of each rank of a machine, in memory that the processes share, so that it outlives a rank that dies.

A process that ends with code 0 may have run to its end, or a reward may have called `os._exit(0)` in it; one that still
exists may be stopped, or hang. The supervisor and rank 0 read from the status which it is. A rank writes its own status
by the functions of this module: `report("what it does")`, `failed()`, `end()`.
"""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlflow.errors import UserError

TEXT = 512  # bytes of the description of a rank's work
SLOTS = 1024  # ranks of a machine
HEARTBEAT_S = 0.5
SILENT_S = 5.0  # without a heartbeat
ENDED = "ended"
AT_FIRST = "before its first step"
PARENT_VARIABLE = "RLFLOW_LAUNCHER_PID"  # of a rank that rank 0 started: rank 0's process
BOARD_VARIABLE = "RLFLOW_STATUS"  # of such a rank: the file that has a place for each rank's status
SUPERVISED_VARIABLE = "RLFLOW_SUPERVISED"  # set where another process says how rank 0 ended


class CommandExit(SystemExit):
    """The exit of a command that has printed all it had to: `--help`, or the report of a dead rank."""


class Status(ctypes.Structure):
    """A rank and what it is doing, in shared memory. Times are of `time.monotonic`, in seconds.

    Attributes:
        rank: Global rank.
        process: Process id; 0 before `start_heartbeat` was called in the process.
        heartbeat: Time when its interpreter last ran, renewed by a thread every `HEARTBEAT_S`.
        limit_s: Seconds that another rank waits for it, its strategy's `timeout_s`; 0 where none waits.
        failed: Time when one of its collectives failed; 0 if none has.
        code: The exit code that it was to end with, set by `end`.
        waits: Number of collectives it waits in.
        saved: Number of steps after which the newest checkpoint was saved; 0 for none.
        text: Description of the rank's work, in UTF-8, cut after `TEXT` bytes; read it by `doing`.
    """

    text: bytes
    _fields_ = (
        ("rank", ctypes.c_int64),
        ("process", ctypes.c_int64),
        ("heartbeat", ctypes.c_double),
        ("limit_s", ctypes.c_double),
        ("failed", ctypes.c_double),
        ("code", ctypes.c_int64),
        ("waits", ctypes.c_int64),
        ("saved", ctypes.c_int64),
        ("text", ctypes.c_char * TEXT),
    )

    def write(self, rank: int, doing: str) -> None:
        """Replace the rank's number and what it is doing."""
        self.rank, self.text = rank, " ".join(doing.split()).encode()[:TEXT]

    @property
    def named(self) -> str:
        """The rank and its machine: `rank 1 on gpu-17`."""
        return f"rank {self.rank} on {socket.gethostname()}"

    @property
    def doing(self) -> str:
        """The rank's present work, such as `step 1, run rewards: ranks 0-1`."""
        return self.text.decode(errors="replace") or AT_FIRST

    @property
    def ended(self) -> bool:
        """Whether the process has ended properly: its run is done, or it has printed why it is not."""
        return self.doing == ENDED

    @property
    def silent_s(self) -> float:
        """Seconds since its interpreter last ran; a stopped process has none that runs."""
        return time.monotonic() - self.heartbeat if self.process else 0.0

    @property
    def silence(self) -> str:
        """The line for users about a rank whose interpreter does not run."""
        return (
            f"{self.named} has not answered for {self.silent_s:.0f} s ({self.doing}): it is stopped, or code in C"
            " holds its interpreter"
        )

    def ending(self, code: int) -> str:
        """End of the process in words: `exited with code 0 (step 1, run rewards), before the run came to its end`.

        Args:
            code: Exit code of the process, or the negative number of the signal that ended it.
        """
        where = "" if self.ended else f" ({self.doing})"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}{where}"
        return f"exited with code {code}{where}" + ("" if self.ended else ", before the run came to its end")


class StatusBoard:
    """The statuses of a machine's ranks by local rank, in a memory-mapped file that the processes share.

    `board[1].doing` is what the rank with the local rank 1 does, such as `step 3, run rewards: ranks 0-1`.

    Args:
        path: The file. On Linux it is `/proc/PID/fd/N`, memory without a name in a file system: other processes of the
            same user can open it as long as the process that made it exists, and it vanishes with the last user.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb+") as file:
            self._statuses = (Status * SLOTS).from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(Status) * SLOTS))

    @classmethod
    def make(cls) -> StatusBoard:
        """Make an empty board that this process owns."""
        if sys.platform == "linux":
            number = os.memfd_create("rlflow-status")
            path = Path(f"/proc/{os.getpid()}/fd/{number}")
        else:
            number, name = tempfile.mkstemp(prefix="rlflow-status-")
            path = Path(name)
            atexit.register(path.unlink, missing_ok=True)
        os.truncate(number, ctypes.sizeof(Status) * SLOTS)  # it takes what is written to, and no more
        return cls(path)

    def __getitem__(self, local_rank: int) -> Status:
        return self._statuses[local_rank]

    @property
    def resume_advice(self) -> str:
        """Advice to continue, after a line that says how the run ended; empty where nothing is known to be saved."""
        steps = self[0].saved
        return f"; continue with `--trainer.ckpt_path last`, after step {steps}" if steps else ""

    def begun(self) -> list[Status]:
        """The statuses of ranks with a process that has begun."""
        return [status for status in self._statuses if status.process]

    def missing(self) -> str | None:
        """After a collective has failed: a line about the rank that did not join it.

            rank 1 on gpu-17 did not join the other ranks within `timeout_s` (600 s): it is at step 3, run rewards: ...

        It is a rank with an interpreter that does not run, because the process is stopped or code in C holds it; else
        one that does something else while others wait. None if the missing rank is on another machine.
        """
        here = [status for status in self.begun() if not status.ended]
        if silent := [status for status in here if status.silent_s > SILENT_S]:
            return max(silent, key=lambda status: status.silent_s).silence
        absent = [status for status in here if not status.failed]
        if len(absent) in (0, len(here)):
            return None
        late = next((status for status in absent if not status.waits), absent[0])
        limit = f"`timeout_s` ({late.limit_s:g} s)" if late.limit_s else "their time limit"
        return f"{late.named} did not join the other ranks within {limit}: it is at {late.doing}"


def _first_rank() -> int:
    """This process's rank before ranks have met: the launcher's global rank, else its local rank, else 0."""
    ranks = (os.environ.get(name) for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"))
    return int(next((rank for rank in ranks if rank), "0"))


_board: StatusBoard | None = None
_mine: Status | None = None
_owner = 0  # the process that writes it: a child that is forked from it has no part in the run


def board() -> StatusBoard:
    """The board of this machine's ranks: the one that rank 0 passed to this process, else a new one."""
    if _board is None:
        given = os.environ.pop(BOARD_VARIABLE, None)
        use(StatusBoard.make() if given is None else StatusBoard(Path(given)))
    assert _board is not None
    return _board


def use(shared: StatusBoard) -> None:
    """From now on, this process writes its status to this board, at the place of its local rank."""
    global _board, _mine, _owner  # of the process, as its exit code is
    _board, _mine, _owner = shared, shared[int(os.environ.get("LOCAL_RANK") or 0)], os.getpid()
    _mine.write(_first_rank(), AT_FIRST)


def mine() -> Status:
    """The status of this process."""
    board()
    assert _mine is not None
    return _mine


def start_heartbeat() -> None:
    """Start a daemon thread that renews this process's heartbeat every `HEARTBEAT_S`; a second call does nothing.

    The heartbeat stops while the process is stopped, or while code in C holds the interpreter lock.
    """
    status = mine()
    if status.process == os.getpid() or os.getpid() != _owner:
        return
    status.heartbeat, status.process = time.monotonic(), os.getpid()

    def go_on() -> None:
        while True:
            time.sleep(HEARTBEAT_S)
            status.heartbeat = time.monotonic()

    threading.Thread(target=go_on, daemon=True, name="heartbeat").start()


def report(rank: int, doing: str) -> None:
    """Write what this rank is doing; a child that was forked from it writes nothing.

    Args:
        rank: The global rank of this process.
        doing: A short text, such as `step 3, run rewards: ranks 0-1`, with which errors name the place.
    """
    status = mine()
    if os.getpid() == _owner:
        status.write(rank, doing)


def begin() -> None:
    """Mark this process as begun and not ended; called by a command before it does anything."""
    report(mine().rank, AT_FIRST)


def is_first() -> bool:
    """Whether this process is rank 0, as far as it knows: before ranks have met, the first of its machine."""
    return mine().rank == 0 and os.environ.get("LOCAL_RANK", "0") == "0"


def end(code: int = 0) -> None:
    """Mark this process as ended, with its coming exit code: its run is done, or it has reported an error.

    A process that exits without having called it counts as dead, whatever its exit code.
    """
    status = mine()
    if os.getpid() == _owner:
        status.code = code
        status.write(status.rank, ENDED)


def saved(steps: int) -> None:
    """Note the step of a complete checkpoint, from which a dead run can resume; 0 for none."""
    mine().saved = steps


def failed() -> None:
    """Note that a collective of this process has failed: another rank did not join it in time, or is gone."""
    mine().failed = time.monotonic()


@contextmanager
def waiting() -> Iterator[None]:
    """A context in which this process counts as waiting for other ranks; around each collective."""
    status = mine()
    status.waits += 1
    try:
        yield
    finally:
        status.waits -= 1


@contextmanager
def refusing_exits() -> Iterator[None]:
    """A context in which a call of `sys.exit` by the user's code is an error, since a run must not end before its end.

    Raises:
        UserError: `sys.exit` was called; the error names the rank and what it was doing. `CommandExit` passes through.
    """
    try:
        yield
    except CommandExit:
        raise
    except SystemExit as error:
        status = mine()
        raise UserError(
            f"rank {status.rank} called `sys.exit({'' if error.code is None else repr(error.code)})` ({status.doing}),"
            " before the run came to its end; raise an error instead"
        ) from error
