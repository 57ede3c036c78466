"""Writes in the background: a thread that does one job after another, and the tensors that are passed to it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from queue import Queue
from types import TracebackType

import torch
from torch import Tensor

ON_THE_WAY = 2  # most tensors in a stream's queue, where the run waits for the writing anyway


class Disk:
    """Does one job after another in a thread.

    After a job fails, jobs given to `do` and `stream` are skipped until `wait`. Jobs given to `report` still run.

    Args:
        asynchronous: Whether the run continues while the thread writes. Tensors are then copied before they are
            written, into memory that is reused at the next save. The thread begins only at `start`: until then the run
            waits for the copies, and writing would delay them.
    """

    def __init__(self, asynchronous: bool = False) -> None:
        self.asynchronous = asynchronous
        self._jobs: Queue[Callable[[BaseException | None], object] | None] = Queue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._copies: dict[str, Tensor] = {}

    def do(self, job: Callable[[], object]) -> None:
        """Let the thread do a job, unless a job before it failed."""
        self.report(lambda error: job() if error is None else None)

    def report(self, job: Callable[[BaseException | None], object]) -> None:
        """Let the thread do a job even if a job before failed; the job gets that error, or None."""
        self._jobs.put(job)
        if not self.asynchronous:
            self.start()

    def stream(self, job: Callable[[Iterable[Tensor]], object]) -> Queue[Tensor | None]:
        """Like `do`, for a job that reads tensors from the returned queue: put copies into it, and None last."""
        queue: Queue[Tensor | None] = Queue(0 if self.asynchronous else ON_THE_WAY)
        tensors = iter(queue.get, None)

        def take(error: BaseException | None) -> None:
            try:
                if error is None:
                    job(tensors)
            finally:
                deque(tensors, maxlen=0)  # empty the queue, so that a `put` does not wait forever

        self.report(take)
        return queue

    def copy(self, key: str, tensor: Tensor) -> Tensor:
        """A copy of the tensor as it is now, on the CPU.

        Args:
            key: Name of the copy's memory, which is used again at the next save.
            tensor: Tensor on any device.
        """
        if not self.asynchronous:
            return tensor.detach().to("cpu", copy=True)
        held = self._copies.get(key)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            pinned = tensor.device.type == "cuda"
            held = self._copies[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        return held.copy_(tensor.detach())

    def start(self) -> None:
        """Let the thread begin: it does the jobs that wait, and further jobs as they come."""
        if self._thread is None:
            # A daemon thread, so that a run that ends by an error does not wait for a disk that hangs.
            self._thread = threading.Thread(target=self._work, name="disk", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Return when all jobs are done.

        Raises:
            BaseException: The error of the first job that failed.
        """
        self.start()
        assert self._thread is not None
        self._jobs.put(None)
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def give_up(self) -> None:
        """If the thread was started, wait until its jobs are done. Else the jobs that wait are never done."""
        if self._thread is not None:
            self.wait()

    def __enter__(self) -> Disk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job(self._error)
            except BaseException as error:
                self._error = self._error or error
