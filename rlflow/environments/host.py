"""Hosts of an environment's code, which runs in the rank's own process, or in a worker that can be killed."""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from rlflow.errors import ENDING, one_line
from rlflow.worker import Worker, WorkerError
from rlflow.worker.child import named
from rlflow.worker.copies import copied


class HostError(WorkerError):
    """An environment in the rank's own process raised, or any environment returned something invalid; says why."""


class InProcess:
    """Runs an environment in the rank's own process: faster than a `Worker`, without limits of time and memory.

    It has the methods of `Worker`, called in the same order. Like a worker's, its environment gets data of its own,
    which it may change; other objects, such as a client, are passed as they are, see `copied`. It runs one
    conversation's environment at a time; while its code runs, the process-wide `random` and NumPy are in the states of
    this conversation.

        host = InProcess()
        host.begin(7, ["my_env.WordGame"])
        host.make("my_env.WordGame", word="house")
        host.call("guess", letter="o")  # what its method returns; a `HostError` if it raises

    Args:
        coroutines: Event loop that several hosts share; None for one of this host's own.
        overlaps: Whether all code runs on this event loop, so that other calls run while one awaits. Then several
            threads may call. Otherwise code that is not a coroutine runs in the thread of its call.
    """

    def __init__(self, coroutines: Coroutines | None = None, overlaps: bool = False) -> None:
        self._coroutines = coroutines or Coroutines()
        self._overlaps = overlaps
        self._owns = coroutines is None
        self._kept: Any = None
        self._draws: OwnDraws | None = None
        self._seed = 0

    def begin(self, seed: int, paths: Sequence[str]) -> None:
        """Begin a conversation: import what is at dotted paths, then seed the states of `random` and NumPy for it."""
        self._draws = OwnDraws(seed)
        for path in paths:
            self._value(path, partial(named, path))
        self._draws = OwnDraws(seed)  # whatever modules drew, where they were not imported before
        self._seed = seed

    def draws(self) -> Any:
        """The conversation's states of `random` and NumPy as JSON; None where nothing was drawn since `begin`."""
        assert self._draws is not None, "nothing has begun"
        states = self._draws.to_json()
        return None if states == OwnDraws(self._seed).to_json() else states

    def set_draws(self, states: Any) -> None:
        """Set the states of `random` and NumPy to what `draws` of a host or worker returned; after `begin`."""
        self._draws = OwnDraws.from_json(states)

    def make(self, path: str, /, **given: Any) -> None:
        """Construct the environment from the class at a dotted path, in place of the one before."""
        self._kept = self._value(path, lambda: named(path)(**copied(given)))

    def call(self, method: str, /, **given: Any) -> Any:
        """The value that a method of the environment returns; a coroutine is awaited."""
        return self._value(method, lambda: getattr(self._kept, method)(**copied(given)))

    def read(self, name: str, /) -> Any:
        """An attribute of the environment; None where it has none."""
        return self._value(name, lambda: getattr(self._kept, name, None))

    def text(self, name: str, method: bool, given: Mapping[str, Any]) -> str:
        """The text that a tool returns, by `str`: a method of the environment, or the function at a dotted path."""
        said = self._value(name, lambda: (getattr(self._kept, name) if method else named(name))(**given))
        text: str = self._value(name, lambda: str(said))  # its own `__str__` is code of the environment too
        return text

    def close(self) -> None:
        """Drop the environment, and end the event loop if it is this host's own."""
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

END_SECONDS = 1.0  # that the end of cancelled tasks is waited for

draws_of_task: ContextVar[OwnDraws | None] = ContextVar("draws_of_task", default=None)


class Coroutines:
    """An event loop in a thread of its own, which starts with the first call; calls that await run concurrently.

    While a call runs, and the tasks that it makes, the process-wide `random` and NumPy are in the states of that call.
    Several threads may call `result`; each waits for its own call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Event, threading.Thread] | None = None

    def result(self, call: Callable[[], Any], draws: OwnDraws | None) -> Any:
        """Run a function on the event loop, plain or `async`, and return its value or raise its error.

        Args:
            call: Function without arguments.
            draws: States of random numbers while it runs; None for those of the process.
        """
        draws_of_task.set(draws)  # tasks have a copy of the context that they are made in
        return asyncio.run_coroutine_threadsafe(_awaited(call), self._loop()).result()

    def close(self) -> None:
        """Cancel calls in progress and close the event loop, if there is one; a later call starts another."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            loop, stop, thread = running
            with suppress(RuntimeError):  # a coroutine that called `sys.exit` has closed it
                loop.call_soon_threadsafe(stop.set)
            thread.join(END_SECONDS)  # longer only where code blocks the loop: its thread is not a reason to stay

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
    """Run an event loop until `stop` is set; tasks in progress are then cancelled."""
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(stop.wait())


class DrawingCoroutine(Coroutine[Any, Any, Any]):
    """A coroutine that replaces the process-wide random states by its own whenever it runs, until it awaits."""

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
    """Own states of `random` and of NumPy's legacy generator, which replace those of the process during a call.

        draws = OwnDraws(seed=7)
        with draws.in_place():
            random.random()  # always the same first number; the next block continues with the second

    Args:
        seed: Seed of both, not below 0; None for a copy of the process's present states.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._states: tuple[Any, Any] = random.getstate(), np.random.get_state()
        if seed is not None:
            self._states = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()

    def to_json(self) -> list[Any]:
        """The states as JSON: `[[version, numbers, gauss], [name, numbers, place, has_gauss, gauss]]`."""
        (version, numbers, gauss), of_numpy = self._states
        kind, array, *rest = of_numpy
        return [[version, list(numbers), gauss], [kind, array.tolist(), *rest]]

    @classmethod
    def from_json(cls, states: list[Any]) -> OwnDraws:
        """The states that `to_json` or `Worker.draws` returned; NumPy's may be None, for the process's present ones."""
        (version, numbers, gauss), of_numpy = states
        draws = cls()
        draws._states = (version, tuple(numbers), gauss), tuple(of_numpy) if of_numpy is not None else draws._states[1]
        return draws

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use these states for the process-wide `random` and NumPy in a `with` block, for one thread at a time.

        Afterwards the states from before the block are back, and these states are those after the block's draws.
        """
        outside = random.getstate(), np.random.get_state()
        random.setstate(self._states[0])
        np.random.set_state(self._states[1])
        try:
            yield
        finally:
            self._states = random.getstate(), np.random.get_state()
            random.setstate(outside[0])
            np.random.set_state(outside[1])
