"""What this process is doing, written where the process that waits for it reads it: the dead cannot say it themselves.

A process that ends with code 0 may have run to its end, or a reward may have called `os._exit(0)` in it; and one that
is there may be stopped, or hang. Who waits for it learns from here which it is.
"""

from __future__ import annotations

import atexit
import mmap
import os
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlflow.errors import UserError

SIZE = 1024  # bytes of a rank
TEXT = 512  # of these, for its number and what it is doing
SLOTS = 1024  # ranks of a machine
BEAT_S = 0.5
NUMBERS = struct.Struct("<qdddqqq")  # process, last beat, its limit, failed since, exit code, collectives, saved steps
PROCESS, BEAT, LIMIT, FAILED, CODE, WAITS, SAVED = range(7)
ENDED = "ended"
AT_FIRST = "before its first step"
PARENT_VARIABLE = "RLFLOW_LAUNCHER_PID"  # of a rank that rank 0 started: rank 0's process
BOARD_VARIABLE = "RLFLOW_STATUS"  # likewise: the file that has a place for each rank's status
SUPERVISED_VARIABLE = "RLFLOW_SUPERVISED"  # set where another process says how rank 0 ended


class Answered(SystemExit):
    """The command has answered and runs nothing, as for `--help`; or it has said on the terminal why it ends."""


class Status:
    """A rank and what it is doing, in memory that processes share.

    Args:
        memory: Of all ranks of the machine.
        slot: The place of this one: its number on the machine.
    """

    def __init__(self, memory: mmap.mmap, slot: int = 0) -> None:
        self._memory = memory
        self._at = slot * SIZE

    def write(self, rank: int, doing: str) -> None:
        """Replace what is there."""
        text = f"{rank}\n{' '.join(doing.split())}".encode()[:TEXT]
        self._memory[self._at : self._at + TEXT] = text.ljust(TEXT, b"\0")

    def set(self, number: int, value: float) -> None:
        """Replace one of `NUMBERS`."""
        kind = NUMBERS.format[1 + number]
        struct.pack_into(f"<{kind}", self._memory, self._at + TEXT + 8 * number, value)

    def get(self, number: int) -> float:
        """One of `NUMBERS`."""
        found: float = NUMBERS.unpack_from(self._memory, self._at + TEXT)[number]
        return found

    @property
    def rank(self) -> str:
        """Of the process, as text."""
        return self._text().partition("\n")[0] or "0"

    @property
    def named(self) -> str:
        """The rank and its machine: `rank 1 on gpu-17`."""
        return f"rank {self.rank} on {socket.gethostname()}"

    @property
    def doing(self) -> str:
        """Such as `step 1, run rewards: ranks 0-1`."""
        return self._text().partition("\n")[2] or AT_FIRST

    @property
    def ended(self) -> bool:
        """Whether the process has come to its end: its run is done, or it has said on the terminal why it is not."""
        return self.doing == ENDED

    @property
    def process(self) -> int:
        """Its number; 0 before it has begun."""
        return int(self.get(PROCESS))

    @property
    def silent_s(self) -> float:
        """Seconds since its interpreter last ran; a stopped process has none that runs."""
        return time.monotonic() - self.get(BEAT) if self.process else 0.0

    @property
    def failed_s(self) -> float:
        """Seconds since a collective of it failed; 0 if none has."""
        failed = self.get(FAILED)
        return time.monotonic() - failed if failed else 0.0

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
        return self._memory[self._at : self._at + TEXT].rstrip(b"\0").decode(errors="replace")


class Board:
    """The statuses of a machine's ranks, in a file without a name, which is gone with those that have it open.

    Args:
        path: By which other processes of the same user open it, as long as the one that made it is there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb+") as file:
            self._memory = mmap.mmap(file.fileno(), SLOTS * SIZE)

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
        os.truncate(number, SLOTS * SIZE)  # it takes what is written to, and no more
        return cls(path)

    def __getitem__(self, local_rank: int) -> Status:
        return Status(self._memory, local_rank)

    @property
    def how_to_go_on(self) -> str:
        """After a line that says how the run ended: from what it goes on; empty where nothing is known to be saved."""
        steps = int(self[0].get(SAVED))
        return f"; continue with `--trainer.ckpt_path last`, after step {steps}" if steps else ""

    def begun(self) -> list[Status]:
        """Of the ranks whose processes have begun."""
        return [status for slot in range(SLOTS) if (status := self[slot]).process]


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK") or 0)


def _first_rank() -> int:
    """The number that a scheduler gave this process, before the run knows it."""
    ranks = (os.environ.get(name) for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"))
    return int(next((rank for rank in ranks if rank), "0"))


_board: Board | None = None
_mine: Status | None = None
_owner = 0  # the process that writes it: a child that is forked from it has no part in the run
_beats = False


def board() -> Board:
    """Of this machine's ranks: the one that this process was given, or one of its own."""
    if _board is None:
        given = os.environ.pop(BOARD_VARIABLE, None)
        use(Board.make() if given is None else Board(Path(given)))
    assert _board is not None
    return _board


def use(shared: Board) -> None:
    """From here on, this process writes its status there."""
    global _board, _mine, _owner, _beats  # of the process, as its exit code is
    _board, _mine, _owner, _beats = shared, shared[_local_rank()], os.getpid(), False
    _mine.write(_first_rank(), AT_FIRST)


def mine() -> Status:
    """Of this process."""
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
    status.set(BEAT, time.monotonic())
    status.set(PROCESS, os.getpid())

    def go_on() -> None:
        while True:
            time.sleep(BEAT_S)
            status.set(BEAT, time.monotonic())

    threading.Thread(target=go_on, daemon=True, name="heartbeat").start()


def limit(seconds: float) -> None:
    """How long another rank waits for this one: its strategy's `timeout_s`; 0 where none waits."""
    mine().set(LIMIT, seconds)


def report(rank: int, doing: str) -> None:
    """Say what this process, a rank of the run, is doing."""
    status = mine()
    if os.getpid() == _owner:
        status.write(rank, doing)


def begin() -> None:
    """This process begins a command, and has not come to its end."""
    report(int(mine().rank), AT_FIRST)


def is_first() -> bool:
    """Whether this process is rank 0, as far as it knows: before ranks have met, the first of its machine."""
    return mine().rank == "0" and os.environ.get("LOCAL_RANK", "0") == "0"


def end(code: int = 0) -> None:
    """This process has come to its end, and its exit code is to be `code`."""
    status = mine()
    if os.getpid() == _owner:
        status.set(CODE, code)
        status.write(int(status.rank), ENDED)


def saved(steps: int) -> None:
    """There is a checkpoint after so many steps; 0 for none."""
    mine().set(SAVED, steps)


def failed() -> None:
    """A collective of this process has failed: another rank did not join it in time, or is gone."""
    mine().set(FAILED, time.monotonic())


@contextmanager
def waiting() -> Iterator[None]:
    """Within, this process waits for other ranks."""
    status = mine()
    status.set(WAITS, status.get(WAITS) + 1)
    try:
        yield
    finally:
        status.set(WAITS, status.get(WAITS) - 1)


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
