"""Processes for the checks that need several ranks, started once."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rlflow.databuffer.transport import of_a_collective
from rlflow.errors import one_line

TIMEOUT_S = 300.0  # for one job on all ranks


class RankFailure(Exception):
    """A rank raised, died, or did not answer in time; the message is one line.

    Args:
        message: Message: what happened.
        node: Name of the node that raised; None where none did.
    """

    def __init__(self, message: str, node: str | None = None) -> None:
        super().__init__(message)
        self.node = node


def message_of(error: BaseException) -> str:
    """An error in one line, with its notes."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"raised {type(error).__name__}: {one_line(error)}{notes}"


class Ranks:
    """Processes joined by gloo that do one job after the other; forked, so that jobs may be of any class.

    Args:
        count: Number of ranks.
        do: Function that does a job on a rank; what it returns can be pickled.
        jobs: The jobs, in order.
        folder: Folder for the results.
    """

    def __init__(self, count: int, do: Callable[[Any], Any], jobs: Sequence[Any], folder: Path) -> None:
        self._folder = folder
        self._count = count
        self._do = do
        self._jobs = list(jobs)
        self._ranks: list[tuple[Any, Connection]] = []
        self._start(0)

    def results(self) -> Iterator[list[Any] | RankFailure]:
        """For each job what the ranks returned, or how one of them failed; then the processes have ended."""
        for number in range(len(self._jobs)):
            try:
                yield self._answers(number)
            except RankFailure as failure:
                self.close()
                self._start(number + 1)  # the others wait for the one that failed
                yield failure
        self.close()

    def close(self) -> None:
        """End the processes."""
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        self._ranks = []

    def _answers(self, number: int) -> list[Any]:
        until, failures = time.monotonic() + TIMEOUT_S, []
        for rank, (process, connection) in enumerate(self._ranks):
            if not connection.poll(max(0.0, until - time.monotonic())):
                failures.append((True, f"rank {rank} did not answer within {TIMEOUT_S:.0f} s", None))
                continue
            try:
                failures += pickle.loads(connection.recv_bytes())
            except EOFError:
                process.join()
                failures.append((True, f"rank {rank} died with exit code {process.exitcode}", None))
        if failures:  # an error outside collectives is the cause of those within
            raise RankFailure(*min(failures, key=lambda each: each[0])[1:])
        return [pickle.loads(self._file(rank, number).read_bytes()) for rank in range(self._count)]

    def _file(self, rank: int, number: int) -> Path:
        return self._folder / f"rank{rank}-{number}.pickle"

    def _start(self, first: int) -> None:
        if first == len(self._jobs):
            return
        context = multiprocessing.get_context("fork")
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._store = store  # the parent serves it, on a port that the system chose
        for rank in range(self._count):
            here, there = context.Pipe()
            process = context.Process(target=self._serve, args=(rank, store.port, first, there), daemon=True)
            process.start()
            there.close()
            self._ranks.append((process, here))

    def _serve(self, rank: int, port: int, first: int, connection: Connection) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._count),
            "LOCAL_WORLD_SIZE": str(self._count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": "lo" if os.path.exists("/sys/class/net/lo") else "",
        }
        torch.set_num_threads(1)
        for name in ("stdout", "stderr"):
            os.dup2(os.open(os.devnull, os.O_WRONLY), {"stdout": 1, "stderr": 2}[name])
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
        for number in range(first, len(self._jobs)):
            try:
                self._file(rank, number).write_bytes(pickle.dumps(self._do(self._jobs[number])))
            except BaseException as error:
                failure = of_a_collective(error), message_of(error), getattr(error, "node", None)
                connection.send_bytes(pickle.dumps([failure]))
                break
            connection.send_bytes(pickle.dumps([]))
        os._exit(0)  # taking torch down in good order costs seconds
