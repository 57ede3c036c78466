"""What this process is doing, written where the process that waits for it reads it: the dead cannot say it themselves.

A process that ends with code 0 may have run to its end, or a reward may have called `os._exit(0)` in it; and one that
is there may be stopped, or hang. Who waits for it learns from here which it is.
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

TEXT = 512  # bytes of what a rank is doing
SLOTS = 1024  # ranks of a machine
BEAT_S = 0.5
SILENT_S = 5.0  # without a heartbeat
ENDED = "ended"
AT_FIRST = "before its first step"
PARENT_VARIABLE = "RLFLOW_LAUNCHER_PID"  # of a rank that rank 0 started: rank 0's process
BOARD_VARIABLE = "RLFLOW_STATUS"  # of such a rank: the file that has a place for each rank's status
SUPERVISED_VARIABLE = "RLFLOW_SUPERVISED"  # set where another process says how rank 0 ended


class Answered(SystemExit):
    """The command has answered and runs nothing, as for `--help`; or it has said on the terminal why it ends."""


class Status(ctypes.Structure):
    """A rank and what it is doing, in memory that processes share. Times are of `time.monotonic`, in seconds.

    Attributes:
        rank: Number of the rank.
        process: Number of the process; 0 before it has begun.
        beat: When its interpreter last ran.
        limit_s: How long another rank waits for it, its strategy's `timeout_s`; 0 where none waits.
        failed: When a collective of it failed; 0 if none has.
        code: What its exit code is to be, once it has ended.
        waits: How many collectives it waits in.
        saved: After how many steps there is a checkpoint; 0 for none.
        text: What the rank does; empty at first.
    """

    rank: int
    process: int
    beat: float
    limit_s: float
    failed: float
    code: int
    waits: int
    saved: int
    text: bytes
    _fields_ = (
        ("rank", ctypes.c_int64),
        ("process", ctypes.c_int64),
        ("beat", ctypes.c_double),
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
        """What the rank does, such as `step 1, run rewards: ranks 0-1`."""
        return self.text.decode(errors="replace") or AT_FIRST

    @property
    def ended(self) -> bool:
        """Whether the process has come to its end: its run is done, or it has said on the terminal why it is not."""
        return self.doing == ENDED

    @property
    def silent_s(self) -> float:
        """Seconds since its interpreter last ran; a stopped process has none that runs."""
        return time.monotonic() - self.beat if self.process else 0.0

    @property
    def failed_s(self) -> float:
        """Seconds since a collective of it failed; 0 if none has."""
        return time.monotonic() - self.failed if self.failed else 0.0

    @property
    def silence(self) -> str:
        """What a user reads of a rank whose interpreter does not run."""
        return (
            f"{self.named} has not answered for {self.silent_s:.0f} s ({self.doing}): it is stopped, or code in C"
            " holds its interpreter"
        )

    def ending(self, code: int) -> str:
        """How the process ended, and where: `exited with code 0 (step 1, run rewards), before the run came to its end`.

        Args:
            code: Its exit code, or the negative number of the signal that ended it.
        """
        where = "" if self.ended else f" ({self.doing})"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}{where}"
        return f"exited with code {code}{where}" + ("" if self.ended else ", before the run came to its end")


class Board:
    """The statuses of a machine's ranks, in a file without a name, which is gone with those that have it open.

    `board[1].doing` is what the rank with the local rank 1 does, such as `step 3, run rewards: ranks 0-1`.

    Args:
        path: By which other processes of the same user open it, as long as the one that made it is there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb+") as file:
            self._statuses = (Status * SLOTS).from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(Status) * SLOTS))

    @classmethod
    def make(cls) -> Board:
        """An empty one, of this process."""
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
    def how_to_go_on(self) -> str:
        """How to continue, after a line that says how the run ended; empty where nothing is known to be saved."""
        steps = self[0].saved
        return f"; continue with `--trainer.ckpt_path last`, after step {steps}" if steps else ""

    def begun(self) -> list[Status]:
        """The statuses of ranks whose processes have begun."""
        return [status for status in self._statuses if status.process]

    def missing(self) -> str | None:
        """What is wrong with the rank that a collective failed for, in a line that begins with its name.

        One whose interpreter does not run, because it is stopped or C code of its task holds it; else one that does
        something while others wait. None if the rank that is missing is none of this machine.
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
    """The number that a scheduler gave this process, before the run knows it."""
    ranks = (os.environ.get(name) for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"))
    return int(next((rank for rank in ranks if rank), "0"))


_board: Board | None = None
_mine: Status | None = None
_owner = 0  # the process that writes it: a child that is forked from it has no part in the run
_beats = False


def board() -> Board:
    """The board of this machine's ranks: the one that this process was given, or one of its own."""
    if _board is None:
        given = os.environ.pop(BOARD_VARIABLE, None)
        use(Board.make() if given is None else Board(Path(given)))
    assert _board is not None
    return _board


def use(shared: Board) -> None:
    """From here on, this process writes its status there."""
    global _board, _mine, _owner, _beats  # of the process, as its exit code is
    _board, _mine, _owner, _beats = shared, shared[int(os.environ.get("LOCAL_RANK") or 0)], os.getpid(), False
    _mine.write(_first_rank(), AT_FIRST)


def mine() -> Status:
    """The status of this process."""
    board()
    assert _mine is not None
    return _mine


def beat() -> None:
    """From here on, a thread says every `BEAT_S` seconds that this process's interpreter runs."""
    global _beats
    status = mine()
    if _beats:
        return
    _beats = True
    status.beat, status.process = time.monotonic(), os.getpid()

    def go_on() -> None:
        while True:
            time.sleep(BEAT_S)
            status.beat = time.monotonic()

    threading.Thread(target=go_on, daemon=True, name="heartbeat").start()


def limit(seconds: float) -> None:
    """How long another rank waits for this one: its strategy's `timeout_s`; 0 where none waits."""
    mine().limit_s = seconds


def report(rank: int, doing: str) -> None:
    """Say what this process, a rank of the run, is doing."""
    status = mine()
    if os.getpid() == _owner:
        status.write(rank, doing)


def begin() -> None:
    """This process begins a command, and has not come to its end."""
    report(mine().rank, AT_FIRST)


def is_first() -> bool:
    """Whether this process is rank 0, as far as it knows: before ranks have met, the first of its machine."""
    return mine().rank == 0 and os.environ.get("LOCAL_RANK", "0") == "0"


def end(code: int = 0) -> None:
    """This process has come to its end, and its exit code is to be `code`."""
    status = mine()
    if os.getpid() == _owner:
        status.code = code
        status.write(status.rank, ENDED)


def saved(steps: int) -> None:
    """There is a checkpoint after so many steps; 0 for none."""
    mine().saved = steps


def failed() -> None:
    """A collective of this process has failed: another rank did not join it in time, or is gone."""
    mine().failed = time.monotonic()


@contextmanager
def waiting() -> Iterator[None]:
    """Within, this process waits for other ranks."""
    status = mine()
    status.waits += 1
    try:
        yield
    finally:
        status.waits -= 1


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
        status = mine()
        raise UserError(
            f"rank {status.rank} called `sys.exit({'' if error.code is None else repr(error.code)})` ({status.doing}),"
            " before the run came to its end; raise an error in its place"
        ) from error
