"""`RewardCalls`: calls of a reward in threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


class RewardCalls:
    """Calls in threads, each known by its place; at the end of the `with` block no call runs.

        with RewardCalls(max_concurrent=4) as calls:
            scores = [calls.begin(place, partial(ask, text)) for place, text in enumerate(texts)]
            return [score.result() for score in scores]

    Args:
        max_concurrent: Most calls that run at the same time. They begin in the order in which they were given.

    Attributes:
        count: Calls that were given.
        began: Time when the first call was given, in seconds of `time.perf_counter`; None before.
        ended: Time when the last call ended; None before the first has.
    """

    def __init__(self, max_concurrent: int) -> None:
        self.count = 0
        self.began: float | None = None
        self.ended: float | None = None
        self._max_concurrent = max_concurrent
        self._futures: dict[int, Future[Any]] = {}
        self._waiting: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> RewardCalls:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def begin(self, place: int, call: Callable[[], Any]) -> Future[Any]:
        """The future of the call for this place: of `call`, or of a call that was given for it before."""
        if place not in self._futures:
            if self.began is None:
                self.began = time.perf_counter()
            self.count += 1
            self._futures[place] = Future()
            self._waiting.put((self._futures[place], call))
            if len(self._threads) < self._max_concurrent:
                # no thread that the end of the process waits for: a server may never answer
                self._threads.append(threading.Thread(target=self._work, name="reward", daemon=True))
                self._threads[-1].start()
        return self._futures[place]

    def close(self, seconds: float | None = None) -> None:
        """Cancel the calls that have not begun, and wait for those that run: for `seconds`, or until they end."""
        for future in self._futures.values():
            future.cancel()
        for _ in self._threads:
            self._waiting.put(None)
        until = None if seconds is None else time.monotonic() + seconds
        for thread in self._threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        """Make one call after another, in a thread."""
        while (waiting := self._waiting.get()) is not None:
            future, call = waiting
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:  # such as `SystemExit`: raised where the result is read
                future.set_exception(error)
            else:
                future.set_result(result)
            self.ended = time.perf_counter()
