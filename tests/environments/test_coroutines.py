"""Environments whose methods are coroutines, side by side in the rank's own process."""

from __future__ import annotations

import asyncio
import random
import sys
import time

import pytest

from rlflow.environments.bridge import ParsedTurn
from rlflow.environments.environment import Environment
from rlflow.environments.host import Coroutines
from rlflow.environments.session import Session
from rlflow.rollout.conversation_loop import EnvironmentCalls


class Dicing:
    """Draws before and after it waits, and in tasks of its own; `delays` says for how long each waits."""

    delays = True

    def initial_observation(self) -> str:
        return str(random.random())

    async def step(self, message: dict[str, str]) -> dict[str, str]:
        said = [random.random()]
        await self.pause()
        said += await asyncio.gather(*(self.drawn(number) for number in range(3)))
        return {"next_messages": f"{said} {random.random()}"}

    async def drawn(self, number: int) -> float:
        value = number + random.random()  # tasks begin in their order, and end in any
        await self.pause()
        return value

    async def pause(self) -> None:
        await asyncio.sleep(0.02 * time.monotonic_ns() % 0.02 if self.delays else 0)


class Prompt(Dicing):
    delays = False


class Plain:
    def initial_observation(self) -> str:
        return "?"

    def step(self, message: dict[str, str]) -> dict[str, str]:
        return {"next_messages": "!"}


class Endless(Plain):
    async def step(self, message: dict[str, str]) -> dict[str, str]:  # type: ignore[override]
        await asyncio.sleep(3600)
        return {}


class Exiting(Plain):
    async def initial_observation(self) -> str:  # type: ignore[override]
        sys.exit(3)


async def wait(seconds: float) -> None:
    """Wait.

    Args:
        seconds: As long.
    """
    await asyncio.sleep(seconds)


PARSED = ParsedTurn("x", (), "x")


def said(environment: Environment, conversations: int = 6) -> list[list[str]]:
    """The answers in each conversation, with seeds of their own and calls side by side."""
    coroutines = Coroutines()
    calls = EnvironmentCalls(environment.max_concurrent_calls, limited=False)
    definition = environment.definition_of({})
    sessions = [Session(definition, environment.host(coroutines), seed=seed) for seed in range(conversations)]
    found: list[list[str]] = [[] for _ in sessions]
    for place, session in enumerate(sessions):
        calls.submit(place, lambda session=session: session.begin([], {})[0]["content"])
    for place, text in calls.answers(conversations):
        found[place].append(text)
    for place, session in enumerate(sessions):
        calls.submit(place, lambda session=session: session.answer(PARSED, 0).messages[0]["content"])
    for place, text in calls.answers(conversations):
        found[place].append(text)
    coroutines.close()
    assert calls.close()
    return found


def test_random_numbers_of_a_coroutine_depend_on_its_conversation_alone() -> None:
    outside = random.getstate()
    alone = said(Environment(Prompt, max_concurrent=1))
    assert said(Environment(Dicing)) == alone
    assert len({text for each in alone for text in each}) == 12
    assert random.getstate() == outside, "the process's own numbers stay"


def test_only_what_has_coroutines_overlaps() -> None:
    assert [Environment(each).max_concurrent_calls for each in (Plain, Dicing)] == [1, 64]
    assert Environment(tools=[wait]).max_concurrent_calls == 64
    assert Environment(Dicing, timeout_s=10, workers=3).max_concurrent_calls == 3


def test_closing_cancels_coroutines_that_still_wait() -> None:
    environment, coroutines = Environment(Endless), Coroutines()
    calls = EnvironmentCalls(environment.max_concurrent_calls, limited=False)
    session = Session(environment.definition_of({}), environment.host(coroutines))
    session.begin([], {})
    calls.submit(0, lambda: session.answer(PARSED, 0))
    began = time.monotonic()
    time.sleep(0.05)
    coroutines.close()
    assert calls.close(), "its thread has ended"
    assert time.monotonic() - began < 30


def test_a_coroutine_that_exits_is_noticed_where_it_was_called() -> None:
    environment, coroutines = Environment(Exiting), Coroutines()
    session = Session(environment.definition_of({}), environment.host(coroutines))
    with pytest.raises(SystemExit):
        session.begin([], {})
    coroutines.close()
