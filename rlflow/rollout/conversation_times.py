"""`ConversationTimes`: when the conversations of a rank waited for environments and for policies."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from rlflow.databuffer.transport import Watch
from rlflow.rollout.conversation_loop import ConversationSteps, EnvironmentCall

T = TypeVar("T")
CONVERSATIONS, SPANS = 8, 64  # whose spans are noted, and how many of each: what a trace takes is bounded


@dataclass(frozen=True)
class Wait:
    """A conversation's wait for a turn of a policy, or for its environment.

    Attributes:
        conversation: By its number among those of the rank.
        of: `environment`, or `policy`.
        start: Of `time.perf_counter`, seconds.
        end: Likewise.
    """

    conversation: int
    of: str
    start: float
    end: float


@dataclass
class ConversationTimes:
    """Of the conversations that a rank has in a node.

    Attributes:
        waits: Of the first conversations.
        count: How many there are; one of several seats is one.
        calls: Seconds of each call of an environment, waiting for its turn not counted.
        idle: Seconds in which this rank waited for environments, and no turn was in progress.
        whole: Seconds of all.
    """

    waits: list[Wait] = field(default_factory=list)
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
                self.waits.append(Wait(number, of, begun, time.perf_counter()))

    def report(self, watch: Watch | None, **where: Any) -> None:
        """Report the waits to whoever watches this rank, and where they were."""
        if watch is None:
            return
        for each in self.waits:
            watch.turn(each.of, each.conversation, each.start, each.end, **where)

    def _called(self, call: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        try:
            return call()
        finally:
            self.calls.append(time.perf_counter() - begun)
