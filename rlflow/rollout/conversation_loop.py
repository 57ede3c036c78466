"""`ConversationLoop`: sends turns of many conversations to engines and calls to environments, in any order, timed."""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, islice
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from rlflow.environments.host import HostError
from rlflow.errors import UserError, one_line
from rlflow.rollout.engine import Completion, GenerationRequest, RolloutEngine, Sampling
from rlflow.worker import WorkerError

T = TypeVar("T")

# What a conversation waits for: a call of its environment, or a policy and the turn that its engine is asked for.
Wait = Callable[[], Any] | tuple[str, GenerationRequest]
# A conversation in progress yields what it waits for, and returns its result. It is sent what the call returned, or the
# `Completion`; where the call failed, a `HostError` is raised in it.
ConversationSteps = Generator[Wait, Any, T]

# What begins conversations for something that arrives while a run is in progress, JSON-able.
OnArrival = Callable[[Any], Iterable[ConversationSteps[Any]]]

ARRIVED = 1 << 32  # the number of the first conversation that arrives; none that a run was given has such a number
CONVERSATIONS, SPANS = 8, 64  # with spans in the trace, and how many spans of each: a trace's size is bounded


class ConversationLoop(Generic[T]):
    """Runs many conversations at the same time.

    The result of a conversation may not depend on the others; then it depends neither on which environment answers
    first nor on `lockstep`. Ranks that share an engine run the same conversations, and get the same answers at the same
    step.

    Args:
        queues: The turns of each policy.
        calls: Calls of environments.
        lockstep: All conversations that are open take their turns together: no engine steps while a call is open, and
            no call is made while an engine steps.
        on_end: Called with the number and the result of each conversation when it is over; None for nothing.
        on_arrival: Begins conversations for values from `calls.arrive`, in addition to the run's; they have no
            result. None where nothing arrives.

    Attributes:
        waits: Waits of the first conversations: for `environment` or `policy`, the conversation's number, start and end
            in seconds of `time.perf_counter`.
    """

    def __init__(
        self,
        queues: Mapping[str, TurnQueue],
        calls: EnvironmentCalls,
        lockstep: bool = False,
        on_end: Callable[[int, T], None] | None = None,
        on_arrival: OnArrival | None = None,
    ) -> None:
        self.waits: list[tuple[str, int, float, float]] = []
        self._on_end = on_end
        self._on_arrival = on_arrival
        self._arrivals = count(ARRIVED)
        self._queues = queues
        self._calls = calls
        self._lockstep = lockstep
        self._open: dict[int, ConversationSteps[Any]] = {}
        self._results: dict[int, T] = {}
        self._next: Iterator[tuple[int, ConversationSteps[T]]] = iter(())
        self._since: dict[int, tuple[str, float]] = {}  # what the first conversations wait for now, and since when
        self._spans = [SPANS] * CONVERSATIONS  # that may still be noted of each of these

    def run(self, conversations: Iterable[ConversationSteps[T]], max_concurrent: int) -> list[T]:
        """Run the conversations, and return their results in order.

        Args:
            conversations: Conversations; each is begun when there is room for it.
            max_concurrent: Most conversations that are open at the same time.

        Raises:
            UserError: A conversation or an engine raised it. The other conversations are given up.
        """
        self._next = iter(enumerate(conversations))
        try:
            self._begin(max_concurrent)
            while self._open:
                self._take_answers()
                if not (self._lockstep and self._calls.open):
                    self._step_engines()
        except UserError:
            for queue in self._queues.values():
                queue.abort()
            raise
        return [self._results[number] for number in sorted(self._results)]

    def _begin(self, most: int = 1) -> None:
        for number, conversation in islice(self._next, most):
            self._open[number] = conversation
            self._resume(number, None)

    def _begin_arrived(self, what: Any) -> None:
        assert self._on_arrival is not None
        for conversation in self._on_arrival(what):
            number = next(self._arrivals)
            self._open[number] = conversation
            self._resume(number, None)

    def _take_answers(self) -> None:
        """Take answers of environments: in lockstep all; else those that are there, waiting only if no turn runs."""
        if not self._calls.open:
            return
        busy = any(queue.busy for queue in self._queues.values())
        least = self._calls.open if self._lockstep else int(not busy)
        for number, value in self._calls.answers(least):
            if number == ARRIVED:
                self._begin_arrived(value)
            else:
                self._resume(number, value)

    def _step_engines(self) -> None:
        """Let each engine take a step; in lockstep, as many steps as there are."""
        ended: dict[int, Completion] = {}
        for queue in self._queues.values():
            while queue.busy:
                ended |= queue.step()
                if not self._lockstep:
                    break
        for number in sorted(ended):
            self._resume(number, ended[number])

    def _resume(self, number: int, value: Any) -> None:
        self._note(number)
        try:
            waits = advanced(self._open[number], value)
        except StopIteration as end:
            del self._open[number]
            if number >= ARRIVED:
                return
            self._results[number] = end.value
            if self._on_end is not None:
                self._on_end(number, end.value)
            self._begin()
            return
        if number < CONVERSATIONS:
            self._since[number] = ("policy" if isinstance(waits, tuple) else "environment", time.perf_counter())
        if isinstance(waits, tuple):
            policy, turn = waits
            self._queues[policy].add(number, turn)
        else:
            self._calls.submit(number, waits)

    def _note(self, number: int) -> None:
        """Record the end of a conversation's wait."""
        if number in self._since and self._spans[number]:
            of, start = self._since.pop(number)
            self._spans[number] -= 1
            self.waits.append((of, number, start, time.perf_counter()))


def run_alone(conversation: ConversationSteps[T], take_turn: Callable[[GenerationRequest], Completion]) -> T:
    """Run one conversation by itself and return its result; its calls are made in this process.

    Args:
        conversation: A conversation that has not begun.
        take_turn: Takes each turn of its policies.
    """
    value: Any = None
    while True:
        try:
            waits = advanced(conversation, value)
        except StopIteration as end:
            result: T = end.value
            return result
        try:
            value = take_turn(waits[1]) if isinstance(waits, tuple) else waits()
        except WorkerError as error:
            value = HostError(str(error))


def advanced(conversation: ConversationSteps[T], value: Any) -> Wait:
    """Resume a conversation with the value it waited for (None at its beginning); returns what it waits for next.

    Raises:
        StopIteration: It is over; with its result.
    """
    return conversation.throw(value) if isinstance(value, HostError) else conversation.send(value)


@dataclass
class TurnQueue:
    """The turns of one policy, on their way through its engine.

    Attributes:
        engine: Holds the weights of `version`.
        sampling: Sampling of the turns.
        version: Version of the policy.
    """

    engine: RolloutEngine
    sampling: Sampling
    version: int
    _new: dict[int, GenerationRequest] = field(default_factory=dict)
    _running: int = 0

    @property
    def busy(self) -> bool:
        """Whether turns are in progress."""
        return bool(self._new or self._running)

    def add(self, number: int, turn: GenerationRequest) -> None:
        """Begin a turn of the conversation of this number with the next step."""
        self._new[number] = turn

    def step(self) -> dict[int, Completion]:
        """Let the engine take a step; returns the turns that have ended, by number."""
        new, self._new = self._new, {}
        self._running += len(new)
        ended = self.engine.step(new, self.sampling, self.version)
        self._running -= len(ended)
        return ended

    def abort(self) -> None:
        """Give up turns in progress."""
        self._new = {}
        if self._running:
            self.engine.abort()
            self._running = 0


LAST_SECONDS = 1.0  # that a call without a limit is waited for when nobody will read its answer
Outcome = tuple[int, dict[str, Any]]  # of the call of this number: its value, or what went wrong


@dataclass(frozen=True)
class SharedCalls:
    """Gives the ranks that share an engine the same answers of environments.

    Attributes:
        calls: Whether this rank makes the calls; one of them does.
        broadcast: Brings that rank's bytes to all of them, a collective.
        seconds: Seconds after which the ranks that wait get an empty answer; less than a collective may take.
    """

    calls: bool
    broadcast: Callable[[bytes], bytes]
    seconds: float


class EnvironmentCalls:
    """Calls environments, several of them in threads; answers are taken as they come.

    Args:
        max_concurrent: Most calls that run at the same time.
        sharing: Division of the calls among the ranks of one engine; None where a rank has an engine alone.
        limited: Whether each call ends by a limit of its own.

    Attributes:
        open: Calls that were submitted and have no answer yet.
        waited: Seconds spent only waiting for calls.
        seconds: Seconds of each call that this rank made, waiting for its turn not counted.
    """

    def __init__(self, max_concurrent: int, sharing: SharedCalls | None = None, limited: bool = True) -> None:
        self.open = 0
        self.waited = 0.0
        self.seconds: list[float] = []
        self._limited = limited
        self._max_concurrent = max_concurrent
        self._threads: list[threading.Thread] = []
        self._submitted: SimpleQueue[tuple[int, Callable[[], Any]] | None] = SimpleQueue()
        self._done: SimpleQueue[Outcome] = SimpleQueue()
        self._sharing = sharing

    def submit(self, number: int, call: Callable[[], Any]) -> None:
        """Make a call, if this is the rank that makes calls.

        Args:
            number: Number of its conversation, which no other open call has.
            call: Returns what is JSON-able.
        """
        self.open += 1
        if self._sharing is None or self._sharing.calls:
            self._submitted.put((number, call))
            if len(self._threads) < min(self.open, self._max_concurrent):
                # no thread that the end of the process waits for: a call may never return
                self._threads.append(threading.Thread(target=self._work, name="environment", daemon=True))
                self._threads[-1].start()

    def arrive(self, what: Any) -> None:
        """Let `answers` return a JSON-able value that no call returned, under the number `ARRIVED`; from any thread.

        If ranks share an engine, the rank that makes the calls takes it.
        """
        self._done.put((ARRIVED, {"value": what}))

    def answers(self, least: int) -> list[tuple[int, Any]]:
        """Values of calls, by number, or a `HostError` for a failure; the same on ranks that share an engine.

        Args:
            least: Number of answers that are waited for.

        Raises:
            UserError: One did.
            RuntimeError: One raised what is neither, an error of our own; with its traceback.
        """
        assert max(1, least) <= self.open, (least, self.open)
        begun = time.perf_counter()
        outcomes = self._shared(least, self._sharing) if self._sharing is not None else self._taken(least, None)
        self.waited += time.perf_counter() - begun if least else 0.0
        outcomes.sort(key=lambda outcome: outcome[0])  # what came together continues in one order
        self.open -= sum(number != ARRIVED for number, _ in outcomes)
        for _, outcome in outcomes:
            if "problem" in outcome:
                raise UserError(outcome["problem"])
            if "broken" in outcome:
                raise RuntimeError(f"a call of an environment broke on the rank that made it:\n{outcome['broken']}")
        return [(number, HostError(x["failed"]) if "failed" in x else x["value"]) for number, x in outcomes]

    def close(self) -> bool:
        """End the threads after their calls have ended; returns whether they have.

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
            start = time.perf_counter()
            outcome = _outcome(call)
            self.seconds.append(time.perf_counter() - start)
            self._done.put((number, outcome))

    def _taken(self, least: int, seconds: float | None) -> list[Outcome]:
        """All answers that have come; at least `least` of them, unless that takes longer than `seconds`."""
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
        """The same outcomes on all ranks, in rounds; a round may bring none."""
        shared: list[Outcome] = []
        while True:
            taken = self._taken(least - len(shared), sharing.seconds) if sharing.calls else []
            shared += [
                (number, outcome) for number, outcome in json.loads(sharing.broadcast(json.dumps(taken).encode()))
            ]
            if len(shared) >= least:
                return shared


def _outcome(call: Callable[[], Any]) -> dict[str, Any]:
    """The result of a call. Nothing is raised here: other ranks may wait for the answer."""
    try:
        value = call()
    except WorkerError as error:
        return {"failed": str(error)}
    except UserError as error:
        return {"problem": str(error)}
    except SystemExit as error:  # it would end only this thread, without a report
        called = f"sys.exit({'' if error.code is None else repr(error.code)})"
        return {"problem": f"an environment called `{called}` before the run came to its end; raise an error instead"}
    except Exception:
        return {"broken": traceback.format_exc()}  # what environments raise is a `WorkerError`
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        return {"failed": f"{type(error).__name__}: {one_line(error)}"}  # an environment's message holds it
    return {"value": value}
