"""`Coroutines`: what environments await in the rank's own process, side by side as tasks of one event loop."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from rlflow.environments.own_draws import OwnDraws

END_SECONDS = 1.0  # that tasks which were cancelled are waited for

draws_of_task: ContextVar[OwnDraws | None] = ContextVar("draws_of_task", default=None)


class Coroutines:
    """Runs calls on one event loop, in a thread that begins with the first; a call may wait while others run.

    Whatever a task and the tasks that it makes draw from the process-wide `random` and NumPy is of the call's own
    states. `results` is for several threads at once, each of which waits for its call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def result(self, call: Callable[[], Any], draws: OwnDraws | None) -> Any:
        """What a call returns, which is made on the loop; what it gives to await is awaited."""
        draws_of_task.set(draws)  # tasks have a copy of the context that they are made in
        return asyncio.run_coroutine_threadsafe(_awaited(call), self._running()).result()

    def close(self) -> None:
        """Cancel what is awaited and close the loop, where there is one; a later call has another."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(loop.stop)
        thread.join(END_SECONDS)  # longer only where code blocks the loop: its thread is no reason to stay

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._loop.set_task_factory(_task)
                self._thread = threading.Thread(target=_run, args=[self._loop], name="coroutines", daemon=True)
                self._thread.start()
            return self._loop


class DrawingCoroutine(Coroutine[Any, Any, Any]):
    """A coroutine that draws from states of its own whenever it runs."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], draws: OwnDraws) -> None:
        self._coroutine = coroutine
        self._draws = draws

    def send(self, value: Any) -> Any:
        with self._draws.in_place():
            return self._coroutine.send(value)

    def throw(self, kind: Any, value: Any = None, traceback: TracebackType | None = None, /) -> Any:
        with self._draws.in_place():
            return self._coroutine.throw(kind if value is None else value)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()


def _task(loop: asyncio.AbstractEventLoop, coroutine: Any, **given: Any) -> asyncio.Task[Any]:
    draws = draws_of_task.get()
    return asyncio.Task(coroutine if draws is None else DrawingCoroutine(coroutine, draws), loop=loop, **given)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped; what is awaited then is cancelled."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.wait(left, timeout=END_SECONDS) if left else asyncio.sleep(0))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()


async def _awaited(call: Callable[[], Any]) -> Any:
    value = call()
    return await value if inspect.isawaitable(value) else value
