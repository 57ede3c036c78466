"""Writing in the background: jobs in a thread of their own, and the tensors that are passed to them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from queue import Queue
from types import TracebackType

import torch
from torch import Tensor

ON_THE_WAY = 2  # tensors that wait to be written, where the run waits for them anyway


class Disk:
    """Does one job after another in a thread; after one that fails, no more until `wait`.

    Args:
        asynchronous: The run continues in the meantime, so what is to be written is copied first; the copies' memory
            is reused the next time. Jobs wait for `start`, since the run waits for the copies, and not for what is
            written.
    """

    def __init__(self, asynchronous: bool = False) -> None:
        self.asynchronous = asynchronous
        self._jobs: Queue[Callable[[BaseException | None], object] | None] = Queue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._copies: dict[str, Tensor] = {}

    def do(self, job: Callable[[], object]) -> None:
        """Let the thread do a job, unless one before failed."""
        self.report(lambda error: job() if error is None else None)

    def report(self, job: Callable[[BaseException | None], object]) -> None:
        """As `do`, in any case, with the error of a job before."""
        self._jobs.put(job)
        if not self.asynchronous:
            self.start()

    def stream(self, job: Callable[[Iterable[Tensor]], object]) -> Queue[Tensor | None]:
        """As `do`, with tensors that are then put into the queue, each a copy, and None behind the last."""
        queue: Queue[Tensor | None] = Queue(0 if self.asynchronous else ON_THE_WAY)
        tensors = iter(queue.get, None)

        def take(error: BaseException | None) -> None:
            try:
                if error is None:
                    job(tensors)
            finally:
                deque(tensors, maxlen=0)  # what is left, so that who puts does not wait

        self.report(take)
        return queue

    def copy(self, key: str, tensor: Tensor) -> Tensor:
        """The tensor as it is now, on the CPU.

        Args:
            key: Name of the memory of its copy, which is used again at the next save.
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
        """Let the thread begin with the jobs it was given, and do those it is given from now on."""
        if self._thread is None:
            # A daemon, so that a run that ends by an error does not wait for a disk that hangs.
            self._thread = threading.Thread(target=self._work, name="disk", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Return when all jobs are done.

        Raises:
            BaseException: What the first of them that failed raised.
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
        """Return when what was begun is done; what was not is never."""
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
