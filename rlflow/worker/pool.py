"""Workers that take calls side by side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from rlflow.worker.limits import Limits
from rlflow.worker.worker import Worker


class WorkerPool:
    """Some workers, of which each call takes a free one, or waits for it. Threads may call it side by side.

    A copy has workers of its own.

    Args:
        limits: What a call may take.
        workers: How many processes.
    """

    def __init__(self, limits: Limits, workers: int) -> None:
        self._made = limits, workers
        self._workers = [Worker(limits) for _ in range(workers)]
        self._free: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._workers:
            self._free.put(worker)

    def function(self, path: str, /, *args: Any, **given: Any) -> Any:
        """What the function at `path` returns.

        Raises:
            WorkerError: It gave no value.
        """
        with self._worker() as worker:
            return worker.function(path, *args, **given)

    def batch(self, path: str, given: dict[str, Any], state: dict[str, Any] | None, logs: list[str]) -> list[Any]:
        """See `batch_call`, of the function at `path`.

        Raises:
            WorkerError: It gave no value.
        """
        with self._worker() as worker:
            return worker.batch(path, given, state, logs)

    @contextmanager
    def _worker(self) -> Iterator[Worker]:
        worker = self._free.get()
        try:
            yield worker
        finally:
            self._free.put(worker)

    def close(self) -> None:
        """Kill all processes; a later call starts new ones."""
        for worker in self._workers:
            worker.close()

    def __reduce__(self) -> tuple[type[WorkerPool], tuple[Limits, int]]:
        return WorkerPool, self._made
