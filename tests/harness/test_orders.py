"""Random agents through `Episode`: each token that one received is trained once, where it was sampled, in any order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow import Harness
from rlflow.context.conversations import TOOLLESS
from rlflow.environments.bridge import Bridge
from rlflow.environments.conversation_format import bridge_of
from rlflow.environments.session import Session
from rlflow.harness.door import HttpAnswer
from rlflow.harness.episode import Episode, EpisodeEnd, EpisodeSettings
from rlflow.rollout.conversation_loop import ConversationSteps
from rlflow.rollout.engine import Completion, GenerationRequest
from tests.harness.agents import MODEL, user
from tests.harness.episodes import AGENTS, decode, tokenizer

END, SPECIAL = 3, 5  # tokens that no text has
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
STEPS = ("goes on", "forks", "rewrites", "compacts", "repeats", "asks for two", "retries", "gives up", "leaves")


@dataclass(frozen=True)
class Script:
    """The actions of a sub-agent.

    Attributes:
        path: Path of the API that it calls.
        opening: First message of the agent.
        more: Fields of its requests.
        steps: Steps that it takes after its first call.
        twins: Number of agents that do the same at the same time.
        odd: Whether the policy may say a token that no text shows.
    """

    path: str
    opening: str
    more: Mapping[str, Any]
    steps: Sequence[str]
    twins: int
    odd: bool


@dataclass
class Call:
    """A request that is sent so many times by one key; of the first `lost` the agent does not get the answer."""

    body: dict[str, Any]
    path: str
    times: int = 1
    lost: int = 0


@st.composite
def scripts(draw: st.DrawFn) -> list[Script]:
    """Sub-agents that never send another's messages and then continue otherwise, since their order would count.

    So they are twins, or else differ in what they ask for. Where words do not tell which tokens were sampled, they
    differ in their branches or first messages.
    """
    odd = draw(st.booleans())
    path, opening = draw(st.sampled_from([CHAT, CHAT, TEXT])), draw(st.sampled_from(["q", "other"]))
    asked = st.tuples(
        st.sampled_from([path, CHAT]),
        st.sampled_from([opening, "q"]),
        st.sampled_from(["", "left"]),
        st.none() if odd else st.sampled_from([None, 7]),
        st.sampled_from([2, 4]) if odd else st.just(4),
        st.sampled_from([None, "b"]) if odd else st.none(),
    )
    made, differ = [], lambda each: each[: 3 if odd else None]
    for path, opening, branch, seed, longest, stop in draw(st.lists(asked, min_size=1, max_size=4, unique_by=differ)):
        steps = draw(st.lists(st.sampled_from(STEPS), max_size=4))
        twins = 1 if "repeats" in steps else draw(st.integers(1, 2))
        more = {"metadata": {"branch": branch}, "seed": seed, "max_tokens": longest, "stop": stop}
        made.append(Script(path, opening, more, steps, twins, odd))
    return made


def acts(script: Script) -> Generator[Call, Sequence[str], None]:
    """A sub-agent: yields its calls, and gets the texts that answer each; of one that it leaves, none."""
    of_chat = script.path == CHAT
    begun: Any = [user(script.opening)] if of_chat else script.opening

    def call(asked: Any, **more: Any) -> Call:
        times = {name: more.pop(name) for name in ("times", "lost") if name in more}
        body = {"model": MODEL, "messages" if of_chat else "prompt": asked, **script.more, **more}
        return Call(body, script.path, **times)

    def after(asked: Any, said: str, new: str) -> Any:
        return [*asked, {"role": "assistant", "content": said}, user(new)] if of_chat else asked + said + new

    asked = begun
    (said,) = yield call(asked)
    first = said
    for number, step in enumerate(script.steps):
        new, wanted = f"m{number}", {}
        if step == "goes on":
            asked = after(asked, said, new)
        elif step == "forks":
            asked = after(begun, first, new)
        elif step == "rewrites":
            asked = after(asked, said.upper(), new)
        elif step == "compacts":
            short = f"{script.opening}, in short ({new}): {said}."
            asked = [user(short)] if of_chat else short
        elif step == "asks for two":
            asked, wanted = after(asked, said, new), {"n": 2}
        elif step in ("retries", "gives up"):
            asked, wanted = after(asked, said, new), {"times": 2, "lost": int(step == "gives up")}
        elif step == "leaves":
            yield call(after(asked, said, f"nobody reads {number}"), stream=True, lost=1)
            asked = after(asked, said, new)
        *_, said = yield call(asked, **wanted)


@cache
def bridge() -> Bridge:
    return bridge_of(TOOLLESS, tokenizer())


@dataclass
class Play:
    """An episode of sub-agents in a random order: of what they send, and of when the policy's turns end.

    Each token that is sampled has another log-probability, by which it is known again.
    """

    scripts: Sequence[Script]
    draws: random.Random
    calls: list[Call] = field(default_factory=list)
    turns: dict[int, tuple[GenerationRequest, Completion]] = field(
        default_factory=dict
    )  # by the log-probability of the first token
    begun: dict[int, list[GenerationRequest]] = field(default_factory=dict)  # by call, as all that follows
    callers: list[Generator[Call, Sequence[str], None]] = field(default_factory=list)
    received: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # the choices of its answer
    answers: dict[int, HttpAnswer] = field(default_factory=dict)  # by request

    def run(self) -> EpisodeEnd:
        harness = Harness(f"{AGENTS}.acts", max_calls=1000)
        policies = {MODEL: ("actor", 1.0)}
        terms = EpisodeSettings(harness, "actor", policies, 400, 400, lambda tools: bridge(), frozenset([END]), decode)
        session = Session(TOOLLESS, harness.host(), {}, place=0)
        episode = Episode(terms, 0, session, [user("q")], 5, self.answers.__setitem__)
        sending: list[tuple[int, int]] = []  # a call, and which try of it
        running: list[tuple[ConversationSteps[None], GenerationRequest]] = []
        waiting: dict[int, int] = {}  # the call, by the request whose answer is waited for
        delivered: list[int] = []

        def resume(agent: Generator[Call, Sequence[str], None], texts: Sequence[str] | None) -> None:
            try:
                self.calls.append(next(agent) if texts is None else agent.send(texts))
            except StopIteration:
                return
            self.callers.append(agent)
            sending.append((len(self.calls) - 1, 0))

        for script in self.scripts:
            for _ in range(script.twins):
                resume(acts(script), None)
        for request in itertools.count():
            kinds: list[list[Any]] = [each for each in (sending, running) if each]
            if not kinds:
                break
            kind = self.draws.choice(kinds)
            what = kind.pop(self.draws.randrange(len(kind)))
            if kind is running:
                steps, turn = what
                _returned(steps, self.completion(turn))
            else:
                number, trial = what
                call = self.calls[number]
                sent = {"request": request, "path": call.path, "body": call.body, "again": trial > 0}
                for steps in episode.arrived({**sent, "once": f"call {number}"}):
                    _, turn = next(steps)
                    running.append((steps, turn))
                    self.begun.setdefault(number, []).append(turn)
                if trial >= call.lost:
                    waiting[request] = number
                if trial + 1 < call.times:
                    sending.append((number, trial + 1))
                elif call.lost == call.times:
                    resume(self.callers[number], [])
            for answered in waiting.keys() & self.answers.keys():
                number = waiting.pop(answered)
                delivered.append(answered)
                if number not in self.received:
                    self.received[number] = self.answers[answered].body["choices"]  # type: ignore[call-overload]
                    resume(self.callers[number], [_text(choice) for choice in self.received[number]])
        play = episode.steps(dict)
        next(play)
        end: EpisodeEnd = _returned(play, {"delivered": delivered, "reward": 1.0, "branches": {"left": 0.5}})
        self.check(end)
        return end

    def completion(self, turn: GenerationRequest) -> Completion:
        """Letters, and an end unless it is cut there; they follow from the seed."""
        draws, first = random.Random(turn.seed), turn.seed % 2**40
        letters = [*b"aab", SPECIAL] if self.scripts[0].odd else [*b"ab"]
        tokens = [*draws.choices(letters, k=draws.randint(1, 2)), END][: turn.longest]
        logprobs = tuple(first + place / 1024 for place in range(len(tokens)))
        completion = Completion(tuple(tokens), logprobs, finished=tokens[-1] == END)
        assert first not in self.turns, "each answer is a sample of its own"
        self.turns[first] = turn, completion
        return completion

    def check(self, end: EpisodeEnd) -> None:
        """Each token that an agent received is trained once, after the tokens after which it was sampled."""
        expected: list[float] = []
        for number in self.received:
            for turn in self.begun[number]:
                _, sampled = self.turns[turn.seed % 2**40]
                stops = self.calls[number].body["stop"] is not None and ord("b") in sampled.token_ids
                length = sampled.token_ids.index(ord("b")) + 1 if stops else len(sampled.token_ids)
                expected += sampled.logprobs[:length]
        trained = [tag for row in end.rows for tag, counts in zip(row.logprobs, row.written, strict=True) if counts]
        assert sorted(trained) == sorted(expected)
        assert end.refused == 0
        assert end.undelivered == len(self.turns) - sum(map(len, self.received.values()))
        for row in end.rows:
            whole = [*row.prompt, *row.tokens]
            for place, (tag, counts) in enumerate(zip(row.logprobs, row.written, strict=True), len(row.prompt)):
                if counts:
                    turn, sampled = self.turns[int(tag)]
                    at = round((tag - int(tag)) * 1024)
                    assert whole[: place - at] == list(turn.prompt)
                    assert whole[place] == sampled.token_ids[at]


def _returned(steps: Generator[Any, Any, Any], value: Any) -> Any:
    """The result of a conversation, given the value that it waited for."""
    try:
        steps.send(value)
    except StopIteration as end:
        return end.value
    raise AssertionError("it goes on")


def _text(choice: Mapping[str, Any]) -> str:
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def told(end: EpisodeEnd) -> list[Any]:
    """All that is trained or shown of each row."""
    columns = ("prompt", "tokens", "logprobs", "written", "segments", "rewards", "messages", "why")
    return [
        (*(getattr(row, name) for name in columns), inherited)
        for row, inherited in zip(end.rows, end.inherited, strict=True)
    ]


def check_in_two_orders(made: list[Script], draws: random.Random) -> None:
    one, other = (Play(made, random.Random(draws.random())).run() for _ in range(2))
    assert told(one) == told(other)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_shared_tokens_of_answers_do_not_depend_on_the_order_of_branches(path: str) -> None:
    """Twins of two branches, whose answers often have the same words and seldom the same tokens."""
    for opening in "abcdef":
        made = [
            Script(path, opening, {"metadata": {"branch": branch}, "max_tokens": 4, "stop": None}, ["goes on"], 2, True)
            for branch in ("", "left")
        ]
        first, *others = (told(Play(made, random.Random(order)).run()) for order in range(5))
        assert others == [first] * 4


@settings(max_examples=30, deadline=None)
@given(scripts(), st.randoms(use_true_random=False))
def test_each_received_token_is_trained_once_whoever_comes_first(made: list[Script], draws: random.Random) -> None:
    check_in_two_orders(made, draws)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(scripts(), st.randoms(use_true_random=False))
def test_thousands_of_random_agents_make_the_same_rows_in_any_order(made: list[Script], draws: random.Random) -> None:
    check_in_two_orders(made, draws)
