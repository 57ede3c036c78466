"""`ConversationLoop`: turns of many conversations go to engines and calls to environments, in any order; timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar

from rlflow.databuffer.transport import Watch
from rlflow.environments.environment_calls import EnvironmentCalls
from rlflow.environments.host import HostError
from rlflow.errors import UserError
from rlflow.rollout.engine import Completion, RolloutEngine, Sampling, Turn
from rlflow.worker import WorkerError

T = TypeVar("T")


@dataclass(frozen=True)
class EnvironmentCall:
    """A conversation waits for its environment: for what the call returns, or a `HostError`."""

    call: Callable[[], Any]


@dataclass(frozen=True)
class PolicyTurn:
    """A conversation waits for a policy: for a `Completion`.

    Attributes:
        policy: Whose turn it is.
        turn: What is asked of its engine.
    """

    policy: str
    turn: Turn


# A conversation in progress: it yields what it waits for, is sent that, and returns its result.
ConversationSteps = Generator[EnvironmentCall | PolicyTurn, Any, T]


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
    _new: dict[int, Turn] = field(default_factory=dict)
    _running: int = 0

    @property
    def busy(self) -> bool:
        """Whether turns are in progress."""
        return bool(self._new or self._running)

    def add(self, number: int, turn: Turn) -> None:
        """A turn of the conversation of this number begins with the next step."""
        self._new[number] = turn

    def step(self) -> dict[int, Completion]:
        """The turns that have ended, by number."""
        new, self._new = self._new, {}
        self._running += len(new)
        ended = self.engine.step(new, self.sampling, self.version)
        self._running -= len(ended)
        return ended

    def abort(self) -> None:
        """Give up what is in progress."""
        self._new = {}
        if self._running:
            self.engine.abort()
            self._running = 0


class ConversationLoop(Generic[T]):
    """Runs conversations.

    The result of a conversation may not depend on the others; then it depends neither on which environment answers
    first nor on `lockstep`. Ranks that share an engine run the same conversations, and get the same answers at the same
    step.

    Args:
        queues: The turns of each policy.
        calls: Calls of environments.
        lockstep: All conversations that are open take their turns together: no engine steps while a call is open, and
            no call is made while an engine steps.
    """

    def __init__(self, queues: Mapping[str, TurnQueue], calls: EnvironmentCalls, lockstep: bool = False) -> None:
        self._queues = queues
        self._calls = calls
        self._lockstep = lockstep
        self._open: dict[int, ConversationSteps[T]] = {}
        self._results: dict[int, T] = {}
        self._next: Iterator[tuple[int, ConversationSteps[T]]] = iter(())

    def run(self, conversations: Iterable[ConversationSteps[T]], at_once: int) -> list[T]:
        """The result of each conversation, in their order.

        Args:
            conversations: Each is begun when there is room for it.
            at_once: How many are open together, at most.

        Raises:
            UserError: Of a conversation or an engine. The others are given up.
        """
        self._next = iter(enumerate(conversations))
        try:
            self._begin(at_once)
            while self._open:
                self._take_answers()
                if not (self._lockstep and self._calls.open):
                    self._step_engines()
        except UserError:
            for queue in self._queues.values():
                queue.abort()
            raise
        return [self._results[number] for number in sorted(self._results)]

    def _begin(self, count: int = 1) -> None:
        for number, conversation in islice(self._next, count):
            self._open[number] = conversation
            self._resume(number, None)

    def _take_answers(self) -> None:
        """Take what environments answered: in lockstep all; else what is there, waiting only where no turn runs."""
        if not self._calls.open:
            return
        busy = any(queue.busy for queue in self._queues.values())
        least = self._calls.open if self._lockstep else int(not busy)
        for number, value in self._calls.answers(least):
            self._resume(number, value)

    def _step_engines(self) -> None:
        """Let engines take a step; in lockstep as many as there are."""
        ended: dict[int, Completion] = {}
        for queue in self._queues.values():
            while queue.busy:
                ended |= queue.step()
                if not self._lockstep:
                    break
        for number in sorted(ended):
            self._resume(number, ended[number])

    def _resume(self, number: int, value: Any) -> None:
        try:
            waits = self._open[number].send(value)
        except StopIteration as end:
            del self._open[number]
            self._results[number] = end.value
            self._begin()
        else:
            if isinstance(waits, EnvironmentCall):
                self._calls.submit(number, waits.call)
            else:
                self._queues[waits.policy].add(number, waits.turn)


def run_alone(conversation: ConversationSteps[T], take_turn: Callable[[Turn], Completion]) -> T:
    """The result of one conversation that waits for nobody else: its calls are made here.

    Args:
        conversation: At its beginning.
        take_turn: Takes each turn of its policies.
    """
    value: Any = None
    while True:
        try:
            waits = conversation.send(value)
        except StopIteration as end:
            result: T = end.value
            return result
        try:
            value = waits.call() if isinstance(waits, EnvironmentCall) else take_turn(waits.turn)
        except WorkerError as error:
            value = HostError(str(error))


CONVERSATIONS, SPANS = 8, 64  # whose spans are noted, and how many of each: what a trace takes is bounded


@dataclass
class ConversationTimes:
    """Of the conversations that a rank has in a node.

    Attributes:
        waits: Of the first conversations: for `environment` or `policy`, the conversation's number, start and end in
            seconds of `time.perf_counter`.
        count: How many there are; one of several seats is one.
        calls: Seconds of each call of an environment, waiting for its turn not counted.
        idle: Seconds in which this rank waited for environments, and no turn was in progress.
        whole: Seconds of all.
    """

    waits: list[tuple[str, int, float, float]] = field(default_factory=list)
    count: int = 0
    calls: list[float] = field(default_factory=list)
    idle: float = 0.0
    whole: float = 0.0

    def timed(self, number: int, steps: ConversationSteps[T]) -> ConversationSteps[T]:
        """The same conversation, of which is noted when it waits."""
        value: Any = None
        noted = 0
        self.count += 1
        while True:
            try:
                waits = steps.send(value)
            except StopIteration as end:
                result: T = end.value
                return result
            begun = time.perf_counter()
            if isinstance(waits, EnvironmentCall):
                value = yield replace(waits, call=partial(self._called, waits.call))
            else:
                value = yield waits
            if number < CONVERSATIONS and noted < SPANS:
                noted += 1
                of = "environment" if isinstance(waits, EnvironmentCall) else "policy"
                self.waits.append((of, number, begun, time.perf_counter()))

    def report(self, watch: Watch | None, **where: Any) -> None:
        """Report the waits to whoever watches this rank, and where they were."""
        if watch is None:
            return
        for of, number, start, end in self.waits:
            watch.turn(of, number, start, end, **where)

    def _called(self, call: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        try:
            return call()
        finally:
            self.calls.append(time.perf_counter() - begun)
