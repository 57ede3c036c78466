"""Where an environment's code runs: in the rank's own process, or in a worker that can be killed."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any, ClassVar

from rlflow.environments.coroutines import Coroutines
from rlflow.environments.own_draws import OwnDraws
from rlflow.errors import ENDING, one_line
from rlflow.worker import Limits, Worker, WorkerError, WorkerRaised


class HostError(Exception):
    """A call gave no value; the text says why, in one line."""


class HostDied(HostError):
    """It took too long or its process ended, and the environment is gone with it."""


class Host(ABC):
    """Runs the code of one environment at a time.

    Attributes:
        limited: Whether a call that takes too long is ended.
    """

    limited: ClassVar[bool] = True

    @abstractmethod
    def begin(self, seed: int, paths: Sequence[str]) -> None:
        """Begin a conversation: import what is at these paths, then seed `random` and NumPy for it."""

    @abstractmethod
    def draws(self) -> Any:
        """The states of `random` and NumPy as JSON; None where nothing was drawn since `begin`."""

    @abstractmethod
    def set_draws(self, states: Any) -> None:
        """Let what is drawn follow from states that `draws` gave; after `begin`."""

    @abstractmethod
    def make(self, path: str, /, **given: Any) -> None:
        """Make the environment, in place of the one before."""

    @abstractmethod
    def call(self, method: str, /, **given: Any) -> Any:
        """What a method of the environment returns."""

    @abstractmethod
    def read(self, name: str, /) -> Any:
        """An attribute of the environment; None where it has none."""

    @abstractmethod
    def text(self, name: str, method: bool, given: Mapping[str, Any]) -> str:
        """What a method of the environment, or else a function, returns, as text."""

    @abstractmethod
    def close(self) -> None:
        """End whatever runs."""


class InProcess(Host):
    """The rank's own process: the fastest, with no limit on what a call takes.

    What is drawn from the process-wide `random` and NumPy is drawn from states of this conversation's own.

    Args:
        coroutines: For the environments of several hosts; of its own where None.
        overlaps: Whether all code runs on the event loop of `coroutines`, where a call that awaits leaves others room.
            Then calls may come from several threads; else what is no coroutine runs in the thread of its call.
    """

    limited = False

    def __init__(self, coroutines: Coroutines | None = None, overlaps: bool = False) -> None:
        self._coroutines = coroutines or Coroutines()
        self._overlaps = overlaps
        self._owns = coroutines is None
        self._kept: Any = None
        self._draws: OwnDraws | None = None
        self._seed = 0

    def begin(self, seed: int, paths: Sequence[str]) -> None:
        self._draws = OwnDraws(seed)
        for path in paths:
            self._value(path, lambda path=path: _at(path))
        self._draws = OwnDraws(seed)  # whatever modules drew, where they were not imported before
        self._seed = seed

    def draws(self) -> Any:
        assert self._draws is not None, "nothing has begun"
        states = self._draws.to_json()
        return None if states == OwnDraws(self._seed).to_json() else states

    def set_draws(self, states: Any) -> None:
        self._draws = OwnDraws.from_json(states)

    def make(self, path: str, /, **given: Any) -> None:
        self._kept = self._value(path, lambda: _at(path)(**given))

    def call(self, method: str, /, **given: Any) -> Any:
        return self._value(method, lambda: getattr(self._kept, method)(**given))

    def read(self, name: str, /) -> Any:
        return self._value(name, lambda: getattr(self._kept, name, None))

    def text(self, name: str, method: bool, given: Mapping[str, Any]) -> str:
        return str(self._value(name, lambda: (getattr(self._kept, name) if method else _at(name))(**given), str))

    def close(self) -> None:
        self._kept = None
        if self._owns:
            self._coroutines.close()

    def _value(self, what: str, call: Any, form: Any = None) -> Any:
        try:
            value = self._coroutines.result(call, self._draws) if self._overlaps else self._here(call)
            if inspect.isawaitable(value):
                value = self._coroutines.result(lambda: value, self._draws)
            return value if form is None else self._formed(form, value)
        except ENDING:
            raise
        except BaseException as error:  # such as `asyncio.CancelledError`
            raise HostError(f"`{what}` raised {type(error).__name__}: {one_line(error)}") from error

    def _formed(self, form: Any, value: Any) -> Any:
        """In the same place: a value's own `__str__` is code of the environment too."""
        return self._coroutines.result(lambda: form(value), self._draws) if self._overlaps else self._here(form, value)

    def _here(self, call: Any, *given: Any) -> Any:
        with self._draws.in_place() if self._draws is not None else nullcontext():
            return call(*given)


class InWorker(Host):
    """A process of its own, with limits of time, memory and output."""

    def __init__(self, limits: Limits) -> None:
        self._worker = Worker(limits)

    def begin(self, seed: int, paths: Sequence[str]) -> None:
        self._value(lambda: self._worker.begin(seed, paths))

    def draws(self) -> Any:
        return self._value(self._worker.draws)

    def set_draws(self, states: Any) -> None:
        self._value(lambda: self._worker.set_draws(states))

    def make(self, path: str, /, **given: Any) -> None:
        self._value(lambda: self._worker.make(path, **given))

    def call(self, method: str, /, **given: Any) -> Any:
        return self._value(lambda: self._worker.call(method, **given))

    def read(self, name: str, /) -> Any:
        return self._value(lambda: self._worker.read(name))

    def text(self, name: str, method: bool, given: Mapping[str, Any]) -> str:
        return str(self._value(lambda: self._worker.text(name, method, given)))

    def close(self) -> None:
        self._worker.close()

    def _value(self, call: Any) -> Any:
        try:
            return call()
        except WorkerRaised as error:
            raise HostError(str(error)) from error
        except WorkerError as error:
            raise HostDied(str(error)) from error


def _at(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)
