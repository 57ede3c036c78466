"""A pool of real processes joined by gloo, started once and given one function after another."""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

import psutil
import torch
import torch.distributed as dist

from tests import no_curves

PRELOADED = [
    "rlflow.run.fit",
    "rlflow.algorithms",
    "deepspeed",
    "peft",
    "transformers.models.qwen2.modeling_qwen2",
    "torch._inductor.compile_fx",
    "matplotlib.backends.backend_agg",
    "tests.controller.runs",
]
LARGEST = 2**30  # bytes of a rank between two functions
PATIENCE_S = 300.0  # for what ends on its own: only a hang takes longer, also on a busy machine
GRACE_S = 5.0  # after one rank has failed, how long the others may still take to answer


class RankError(AssertionError):
    """A rank raised, died or did not answer in time; the message says which, with its traceback."""


class RankPool:
    """`world_size` processes, one thread each, in one gloo group.

    Ranks see `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` as torchrun sets them.

        with RankPool(2) as ranks:
            assert ranks.run(dist.get_rank) == [0, 1]

    Args:
        world_size: Number of processes.
        environment: More environment variables for them, set before the first function's module is imported there.
    """

    def __init__(self, world_size: int, environment: dict[str, str] | None = None) -> None:
        self.world_size = world_size
        self.environment = environment or {}
        self._ranks: list[tuple[BaseProcess, Connection]] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = PATIENCE_S) -> list[Any]:
        """Call `function(*args)` on every rank at once; the results by rank.

        Args:
            function: A function at the top of an importable module. Its rank is `torch.distributed.get_rank()`.
            args: Picklable, the same on every rank.
            timeout_s: Seconds for all ranks together, their start included.

        Raises:
            RankError: A rank raised, died, or was not done in time. Ranks that hang are killed; the next `run`
                starts new ones.
        """
        if not self._ranks:
            self._start()
        for _, connection in self._ranks:
            connection.send_bytes(pickle.dumps((function, args)))
        answers, failures = self._collect(time.monotonic() + timeout_s)
        if len(answers) < self.world_size:
            missing = [rank for rank in range(self.world_size) if rank not in answers]
            self._kill()
            failures.append(f"no answer from ranks {missing} of {self.world_size}; `{function.__name__}` was killed")
        if failures:
            raise RankError("\n".join(failures))
        if any(psutil.Process(process.pid).memory_info().rss > LARGEST for process, _ in self._ranks):
            self.close()  # they have grown by what libraries keep; the next `run` starts new ones
        return [answers[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """End the processes."""
        for _, connection in self._ranks:
            connection.close()  # the rank's loop ends at the end of its pipe
        for process, _ in self._ranks:
            process.join(GRACE_S)
        self._kill()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        # One server imports what ranks need, and they are forked from it; where a pool has variables of its own, its
        # processes import for themselves.
        context = multiprocessing.get_context("spawn" if self.environment else "forkserver")
        if not self.environment:
            context.set_forkserver_preload(PRELOADED)
        # The parent serves the store, on a port that the system chose: no port is guessed, none is raced for.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world_size):
            here, there = context.Pipe()
            environment = self.environment | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_WORLD_SIZE": str(self.world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # join the parent's store instead of serving one
                "OMP_NUM_THREADS": "1",
            }
            process = context.Process(target=_serve, args=(there, environment), name=f"rank {rank}")
            process.start()
            there.close()
            self._ranks.append((process, here))

    def _collect(self, deadline: float) -> tuple[dict[int, Any], list[str]]:
        """The answer of every rank, and the tracebacks of those that raised (whose answer is None)."""
        pending = {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
        answers: dict[int, Any] = {}
        failures: list[str] = []
        while pending and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(pending), left):
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    answers[rank], failure = pickle.loads(connection.recv_bytes())
                except EOFError:
                    process = self._ranks[rank][0]
                    process.join(GRACE_S)
                    failure = f"died with exit code {process.exitcode}"
                if failure:
                    failures.append(f"rank {rank} of {self.world_size}: {failure}")
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers, failures

    def _kill(self) -> None:
        for process, connection in self._ranks:
            connection.close()
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGUSR1)  # prints its stack
                process.join(0.2)
                process.kill()
            process.join()
        self._ranks = []


def _answer(message: bytes) -> bytes:
    result, failure = None, ""
    try:
        function, args = pickle.loads(message)
        result = function(*args)
    except BaseException:
        failure = traceback.format_exc()
    return pickle.dumps((result, failure))


def return_freed_memory() -> None:
    """Give what earlier tests freed back to the machine: many processes live as long as the session does.

    What is left, such as modules that they imported, is not looked through again: it takes a second after a while.
    """
    gc.collect()
    gc.freeze()
    ctypes.CDLL(None).malloc_trim(0)


def _serve(connection: Connection, environment: dict[str, str]) -> None:
    faulthandler.enable()  # a crash in C leaves the stacks of all threads
    faulthandler.register(signal.SIGUSR1)
    os.environ.update(environment)
    torch.set_num_threads(1)
    no_curves.leave_empty()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=PATIENCE_S))
    gc.freeze()  # what the libraries made stays, and need not be looked through after each function
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            break
        connection.send_bytes(_answer(message))
        return_freed_memory()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # taking torch down in good order costs seconds
