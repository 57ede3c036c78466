"""`EnvironmentCalls`: many environments called side by side, with the same answers on ranks that share an engine."""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from rlflow.environments.host import HostError
from rlflow.errors import UserError, one_line
from rlflow.worker import WorkerError

LAST_SECONDS = 1.0  # that a call without a limit is waited for when nobody will read its answer
Outcome = tuple[int, dict[str, Any]]  # of the call of this number: its value, or what went wrong


@dataclass(frozen=True)
class SharedCalls:
    """How ranks that share an engine get the same answers of environments.

    Attributes:
        calls: Whether this rank makes the calls; one of them does.
        broadcast: Brings that rank's bytes to all of them, a collective.
        seconds: After which those that wait are told that there is nothing yet; less than a collective may take.
    """

    calls: bool
    broadcast: Callable[[bytes], bytes]
    seconds: float


class EnvironmentCalls:
    """Calls environments, several of them in threads; answers come as they are there.

    Args:
        at_once: Calls side by side.
        sharing: Where several ranks share one engine; None where a rank speaks alone.
        limited: Whether each call ends by a limit of its own.

    Attributes:
        open: Calls that were submitted and have no answer yet.
        waited: Seconds in which nothing was done but to wait for calls.
    """

    def __init__(self, at_once: int, sharing: SharedCalls | None = None, limited: bool = True) -> None:
        self.open = 0
        self.waited = 0.0
        self._limited = limited
        self._at_once = at_once
        self._threads: list[threading.Thread] = []
        self._submitted: SimpleQueue[tuple[int, Callable[[], Any]] | None] = SimpleQueue()
        self._done: SimpleQueue[Outcome] = SimpleQueue()
        self._sharing = sharing

    def submit(self, number: int, call: Callable[[], Any]) -> None:
        """Make a call, if it is this rank that does.

        Args:
            number: That tells it from others that are open.
            call: Returns what is JSON-able.
        """
        self.open += 1
        if self._sharing is None or self._sharing.calls:
            self._submitted.put((number, call))
            if len(self._threads) < min(self.open, self._at_once):
                # no thread that the end of the process waits for: a call may never return
                self._threads.append(threading.Thread(target=self._work, name="environment", daemon=True))
                self._threads[-1].start()

    def answers(self, least: int) -> list[tuple[int, Any]]:
        """What calls returned, by number; a `HostError` in place of what failed. Alike on ranks that share an engine.

        Args:
            least: As many are waited for.

        Raises:
            UserError: One did.
            RuntimeError: One raised what is neither, an error of our own; with its traceback.
        """
        assert max(1, least) <= self.open, (least, self.open)
        begun = time.perf_counter()
        outcomes = self._shared(least, self._sharing) if self._sharing is not None else self._taken(least, None)
        self.waited += time.perf_counter() - begun if least else 0.0
        outcomes.sort(key=lambda outcome: outcome[0])  # what came together goes on in one order
        self.open -= len(outcomes)
        for _, outcome in outcomes:
            if "problem" in outcome:
                raise UserError(outcome["problem"])
            if "broken" in outcome:
                raise RuntimeError(f"a call of an environment broke on the rank that made it:\n{outcome['broken']}")
        return [(number, HostError(x["failed"]) if "failed" in x else x["value"]) for number, x in outcomes]

    def close(self) -> bool:
        """End the threads, when the calls that run have ended; whether they have.

        Each has its limit, or else is waited for no longer than `LAST_SECONDS`.
        """
        while not self._submitted.empty():
            with suppress(Empty):
                self._submitted.get_nowait()
        for _ in self._threads:
            self._submitted.put(None)
        until = time.monotonic() + LAST_SECONDS
        for thread in self._threads:
            thread.join(None if self._limited else max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        """Make one call after another, in a thread."""
        while (submitted := self._submitted.get()) is not None:
            number, call = submitted
            self._done.put((number, _outcome(call)))

    def _taken(self, least: int, seconds: float | None) -> list[Outcome]:
        """All that are there; so many at least, unless that takes longer."""
        taken: list[Outcome] = []
        until = None if seconds is None else time.monotonic() + seconds
        while len(taken) < least or not self._done.empty():
            left = None if until is None else max(0.0, until - time.monotonic())
            try:
                taken.append(self._done.get(timeout=left))
            except Empty:
                break
        return taken

    def _shared(self, least: int, sharing: SharedCalls) -> list[Outcome]:
        """The same on all ranks, in rounds of which some may bring nothing."""
        shared: list[Outcome] = []
        while True:
            taken = self._taken(least - len(shared), sharing.seconds) if sharing.calls else []
            shared += [
                (number, outcome) for number, outcome in json.loads(sharing.broadcast(json.dumps(taken).encode()))
            ]
            if len(shared) >= least:
                return shared


def _outcome(call: Callable[[], Any]) -> dict[str, Any]:
    """What a call came to. Nothing is raised here: other ranks may wait for the answer."""
    try:
        value = call()
    except WorkerError as error:
        return {"failed": str(error)}
    except UserError as error:
        return {"problem": str(error)}
    except Exception:
        return {"broken": traceback.format_exc()}  # what environments raise is a `WorkerError`
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        return {"failed": f"{type(error).__name__}: {one_line(error)}"}  # an environment's message holds it
    return {"value": value}
