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
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rlflow.errors import one_line

TIMEOUT_S = 120.0  # for one job on all ranks


class RankFailure(Exception):
    """A rank raised, died, or did not answer in time; the message is one line.

    Args:
        message: What happened.
        node: Name of the node that raised; None where none did.
    """

    def __init__(self, message: str, node: str | None = None) -> None:
        super().__init__(message)
        self.node = node


def said(error: BaseException) -> str:
    """An error in one line, with its notes."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"raised {type(error).__name__}: {one_line(error)}{notes}"


class Ranks:
    """Processes joined by gloo that do one job after the other; forked, so that jobs may be of any class.

    Args:
        count: Number of ranks.
        do: Does a job on a rank; what it returns can be pickled.
        jobs: The jobs, in order.
    """

    def __init__(self, count: int, do: Callable[[Any], Any], jobs: Sequence[Any]) -> None:
        self._count = count
        self._do = do
        self._jobs = list(jobs)
        self._ranks: list[tuple[Any, Connection]] = []
        self._start(self._jobs)

    def results(self) -> Iterator[list[Any] | RankFailure]:
        """For each job what the ranks returned, or how one of them failed; then the processes have ended."""
        for number in range(len(self._jobs)):
            try:
                yield self._answers()
            except RankFailure as failure:
                self.close()
                self._start(self._jobs[number + 1 :])  # the others wait for the one that failed
                yield failure
        self.close()

    def close(self) -> None:
        """End the processes."""
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        self._ranks = []

    def _answers(self) -> list[Any]:
        until, answers = time.monotonic() + TIMEOUT_S, []
        pending = dict(enumerate(self._ranks))
        while pending:
            for rank, (process, connection) in list(pending.items()):
                if connection.poll(0.02):
                    try:
                        failed, answer = pickle.loads(connection.recv_bytes())
                    except EOFError:
                        process.join()
                        raise RankFailure(f"rank {rank} died with exit code {process.exitcode}") from None
                    if failed:
                        raise RankFailure(*answer)
                    answers.append((rank, answer))
                    del pending[rank]
                elif time.monotonic() > until:
                    raise RankFailure(f"rank {rank} did not answer within {TIMEOUT_S:.0f} s")
        return [answer for _, answer in sorted(answers, key=lambda each: each[0])]

    def _start(self, jobs: Sequence[Any]) -> None:
        if not jobs:
            return
        context = multiprocessing.get_context("fork")
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._store = store  # the parent serves it, on a port that the system chose
        for rank in range(self._count):
            here, there = context.Pipe()
            process = context.Process(target=self._serve, args=(rank, store.port, jobs, there), daemon=True)
            process.start()
            there.close()
            self._ranks.append((process, here))

    def _serve(self, rank: int, port: int, jobs: Sequence[Any], connection: Connection) -> None:
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
        for job in jobs:
            try:
                connection.send_bytes(pickle.dumps((False, self._do(job))))
            except BaseException as error:
                connection.send_bytes(pickle.dumps((True, (said(error), getattr(error, "node", None)))))
                break
        os._exit(0)  # taking torch down in good order costs seconds
