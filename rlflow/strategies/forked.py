"""A rank that is forked from rank 0's process, with all that was imported and prepared there."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlflow import status

POLL_S = 0.05
TOKENIZERS = "TOKENIZERS_PARALLELISM"  # a variable that Hugging Face's tokenizers read at every call


class ForkedRank:
    """What `subprocess.Popen` is to a rank that was started as a script.

    Args:
        pid: Of the process.

    Attributes:
        returncode: None while it runs; the negative number of the signal that ended it.
    """

    def __init__(self, pid: int) -> None:
        self.returncode: int | None = None
        self._pid = pid
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        with self._lock:
            if self.returncode is None and (waited := os.waitpid(self._pid, os.WNOHANG))[0]:
                self.returncode = os.waitstatus_to_exitcode(waited[1])
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Its exit code.

        Raises:
            subprocess.TimeoutExpired: It has not ended in so many seconds.
        """
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"rank of process {self._pid}", timeout)
            time.sleep(POLL_S)
        return code

    def kill(self) -> None:
        """End it."""
        with self._lock:
            if self.returncode is None:
                os.kill(self._pid, 9)


def can_fork() -> bool:
    """Whether ranks that compute on the CPU may be forked from this process: `rlflow fit` itself, and not a script.

    Of a script nobody knows what it did before. A thread of Python would be missing in the copy.
    """
    return sys.platform == "linux" and status.SUPERVISED_VARIABLE in os.environ and threading.active_count() == 1


@contextmanager
def fit_to_fork() -> Iterator[None]:
    """Within it torch and tokenizers start no threads: a fork would wait for them for good, for it has none."""
    threads, said = torch.get_num_threads(), os.environ.get(TOKENIZERS)
    torch.set_num_threads(1)
    os.environ[TOKENIZERS] = "false"
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        os.environ.pop(TOKENIZERS)
        if said is not None:
            os.environ[TOKENIZERS] = said


def fork() -> ForkedRank | None:
    """The new process, in which None is returned."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python warns where there are threads: of BLAS, tokenizers and Arrow, which prepare themselves for a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    return ForkedRank(pid) if pid else None
