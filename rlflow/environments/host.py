"""Where an environment's code runs: in the rank's own process, or in a worker that can be killed."""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from types import TracebackType
from typing import Any

import numpy as np

from rlflow.errors import ENDING, one_line
from rlflow.worker import Worker, WorkerError


class HostError(WorkerError):
    """An environment in the rank's own process raised, or one anywhere gave what is no answer; the text says why."""


class InProcess:
    """Does what `Worker` does in the rank's own process: the fastest, with no limit on what a call takes.

    What is drawn from the process-wide `random` and NumPy is drawn from states of this conversation's own.

    Args:
        coroutines: For the environments of several hosts; of its own where None.
        overlaps: Whether all code runs on the event loop of `coroutines`, where a call that awaits leaves others room.
            Then calls may come from several threads; else what is no coroutine runs in the thread of its call.
    """

    def __init__(self, coroutines: Coroutines | None = None, overlaps: bool = False) -> None:
        self._coroutines = coroutines or Coroutines()
        self._overlaps = overlaps
        self._owns = coroutines is None
        self._kept: Any = None
        self._draws: OwnDraws | None = None
        self._seed = 0

    def begin(self, seed: int, paths: Sequence[str]) -> None:
        """Begin a conversation: import what is at these paths, then seed `random` and NumPy for it."""
        self._draws = OwnDraws(seed)
        for path in paths:
            self._value(path, partial(_at, path))
        self._draws = OwnDraws(seed)  # whatever modules drew, where they were not imported before
        self._seed = seed

    def draws(self) -> Any:
        """The states of `random` and NumPy as JSON; None where nothing was drawn since `begin`."""
        assert self._draws is not None, "nothing has begun"
        states = self._draws.to_json()
        return None if states == OwnDraws(self._seed).to_json() else states

    def set_draws(self, states: Any) -> None:
        """Let what is drawn follow from states that `draws` gave; after `begin`."""
        self._draws = OwnDraws.from_json(states)

    def make(self, path: str, /, **given: Any) -> None:
        """Make the environment, in place of the one before."""
        self._kept = self._value(path, lambda: _at(path)(**given))

    def call(self, method: str, /, **given: Any) -> Any:
        """What a method of the environment returns."""
        return self._value(method, lambda: getattr(self._kept, method)(**given))

    def read(self, name: str, /) -> Any:
        """An attribute of the environment; None where it has none."""
        return self._value(name, lambda: getattr(self._kept, name, None))

    def text(self, name: str, method: bool, given: Mapping[str, Any]) -> str:
        """What a method of the environment, or else a function, returns, as text."""
        said = self._value(name, lambda: (getattr(self._kept, name) if method else _at(name))(**given))
        text: str = self._value(name, lambda: str(said))  # its own `__str__` is code of the environment too
        return text

    def close(self) -> None:
        """End whatever runs."""
        self._kept = None
        if self._owns:
            self._coroutines.close()

    def _value(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            value = self._coroutines.result(call, self._draws) if self._overlaps else self._here(call)
            if inspect.isawaitable(value):
                value = self._coroutines.result(lambda: value, self._draws)
            return value
        except ENDING:
            raise
        except BaseException as error:  # such as `asyncio.CancelledError`
            raise HostError(f"`{what}` raised {type(error).__name__}: {one_line(error)}") from error

    def _here(self, call: Callable[[], Any]) -> Any:
        with self._draws.in_place() if self._draws is not None else nullcontext():
            return call()


Host = InProcess | Worker  # runs the code of one environment at a time; a worker ends calls that take too long


def _at(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


END_SECONDS = 1.0  # that the end of cancelled tasks is waited for

draws_of_task: ContextVar[OwnDraws | None] = ContextVar("draws_of_task", default=None)


class Coroutines:
    """Runs calls on one event loop, in a thread that begins with the first; a call may wait while others run.

    Whatever a task and the tasks that it makes draw from the process-wide `random` and NumPy is of the call's own
    states. `result` is for several threads at once, each of which waits for its call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Event, threading.Thread] | None = None

    def result(self, call: Callable[[], Any], draws: OwnDraws | None) -> Any:
        """What a call returns, which is made on the loop; what it gives to await is awaited."""
        draws_of_task.set(draws)  # tasks have a copy of the context that they are made in
        return asyncio.run_coroutine_threadsafe(_awaited(call), self._loop()).result()

    def close(self) -> None:
        """Cancel what is awaited and close the loop, where there is one; a later call has another."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            loop, stop, thread = running
            with suppress(RuntimeError):  # a coroutine that called `sys.exit` has closed it
                loop.call_soon_threadsafe(stop.set)
            thread.join(END_SECONDS)  # longer only where code blocks the loop: its thread is no reason to stay

    def _loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._running is None:
                loop, stop = asyncio.new_event_loop(), asyncio.Event()
                loop.set_task_factory(_task)
                thread = threading.Thread(target=_run, args=[loop, stop], name="coroutines", daemon=True)
                thread.start()
                self._running = loop, stop, thread
            return self._running[0]


def _run(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Run a loop until the event is set; what is awaited then is cancelled."""
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(stop.wait())


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


async def _awaited(call: Callable[[], Any]) -> Any:
    value = call()
    return await value if inspect.isawaitable(value) else value


class OwnDraws:
    """States of `random` and of NumPy's legacy generator, in place of the process's for as long as a call takes.

    Args:
        seed: Not below 0; the same gives the same numbers. None for the states that are there.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._states: tuple[Any, Any] = random.getstate(), np.random.get_state()
        if seed is not None:
            self._states = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()

    def to_json(self) -> list[Any]:
        """The states."""
        (version, numbers, gauss), of_numpy = self._states
        kind, array, *rest = of_numpy
        return [[version, list(numbers), gauss], [kind, array.tolist(), *rest]]

    @classmethod
    def from_json(cls, states: list[Any]) -> OwnDraws:
        """States that `to_json`, or a worker, gave."""
        (version, numbers, gauss), of_numpy = states
        draws = cls()
        draws._states = (version, tuple(numbers), gauss), tuple(of_numpy) if of_numpy is not None else draws._states[1]
        return draws

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it the process draws from these states; afterwards from what was there. For one thread at a time."""
        outside = random.getstate(), np.random.get_state()
        random.setstate(self._states[0])
        np.random.set_state(self._states[1])
        try:
            yield
        finally:
            self._states = random.getstate(), np.random.get_state()
            random.setstate(outside[0])
            np.random.set_state(outside[1])
