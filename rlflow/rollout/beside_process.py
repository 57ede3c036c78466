"""The process beside a rank that an engine has for itself: started, talked to, ended; and how its death is told."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any

import torch

from rlflow.rollout import engine_process
from rlflow.rollout.engine_process import EngineGroup

POLL_S = 0.2
END_S = 30.0  # how long an engine may take to close
DRAIN_S = 1.0  # how long to wait for the last of its errors
TAIL = 4096  # bytes of them that an error repeats


class EngineProcessError(RuntimeError):
    """The process beside a rank died, hung, or failed in a way that is no user's and no sync's fault."""


class EngineProcessGone(EngineProcessError):
    """The process died, or did not answer in time and was ended."""


class BesideProcess:
    """The process, and what goes to it and comes from it.

    It is started as a command of its own, so that the user's script is not run again. What it prints goes where this
    process's output goes at that moment; the end of its errors is kept, in case it dies.
    """

    def __init__(self, rank: int, group: EngineGroup, local_rank: int) -> None:
        self.name = f"rank {rank}: the process of its engine"
        self._timeout_s = group.timeout_s
        here, there = socket.socketpair()
        limit = struct.pack("ll", *divmod(round(group.timeout_s * 1e6), 10**6))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # not to hang in the middle of a message either
            here.setsockopt(socket.SOL_SOCKET, option, limit)
        self._connection = Connection(here.detach())
        call = f"from {engine_process.__name__} import main; main({there.fileno()}, {os.getpid()})"
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-c", call],
            env=_environment(group, local_rank),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[there.fileno()],
        )
        there.close()
        self._last_words = b""
        self._listener = threading.Thread(target=self._listen, args=(os.dup(2),), daemon=True, name="engine-errors")
        self._listener.start()

    @property
    def runs(self) -> bool:
        return self._popen.poll() is None

    def send(self, message: Any, doing: str, descriptor: int | None = None) -> None:
        """Send a message, and a file descriptor after it, which is closed here."""
        try:
            self._connection.send_bytes(pickle.dumps(message))
            if descriptor is not None:
                send_handle(self._connection, descriptor, self._popen.pid)
        except BlockingIOError:
            raise self._late(doing) from None
        except OSError:
            raise self._death(doing) from None
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def receive(self, doing: str) -> Any:
        deadline = time.monotonic() + self._timeout_s
        try:
            while not self._connection.poll(min(POLL_S, max(0.0, deadline - time.monotonic()))):
                if not self.runs and not self._connection.poll():  # another process may hold the socket open
                    raise self._death(doing)
                if time.monotonic() > deadline:
                    raise self._late(doing)
            return self._connection.recv()
        except BlockingIOError:
            raise self._late(doing) from None
        except (EOFError, ConnectionError):
            raise self._death(doing) from None

    def end(self, grace_s: float) -> None:
        """Close the connection, at which the process ends; kill it if it does not."""
        self._connection.close()
        try:
            self._popen.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._listener.join(DRAIN_S)

    def _late(self, doing: str) -> EngineProcessGone:
        self.end(0.0)
        return EngineProcessGone(
            f"{self.name} should {doing} and did not within {self._timeout_s:g} s; ended it.{self._repeated()}"
        )

    def _death(self, doing: str) -> EngineProcessGone:
        self.end(END_S)
        code = self._popen.returncode
        how = f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        return EngineProcessGone(f"{self.name} {how} when it should {doing}.{self._repeated()}")

    def _repeated(self) -> str:
        words = self._last_words.decode(errors="replace").strip()
        return f" The end of its errors:\n{words}" if words else " It left no error."

    def _listen(self, errors: int) -> None:
        """Pass on what the process prints to its errors, and keep the end of it."""
        assert self._popen.stderr is not None
        with self._popen.stderr as stream, os.fdopen(errors, "wb", buffering=0) as out:
            while chunk := os.read(stream.fileno(), TAIL):
                self._last_words = (self._last_words + chunk)[-TAIL:]
                with suppress(OSError):  # a terminal that is gone
                    out.write(chunk)


def _environment(group: EngineGroup, local_rank: int) -> dict[str, str]:
    """This process's, but for the job that the rank is in: the engine's processes are a job of their own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC_", "PET_"))}
    host, _, port = group.address.rpartition(":")
    return environment | {
        "RANK": str(group.index),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(group.size),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": str(torch.get_num_threads()),  # sums are in another order with other numbers of threads
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),
        "PYTHONUNBUFFERED": "1",
    }
