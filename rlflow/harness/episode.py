"""`Episode`: the calls of one agent and the policy's answers; at its end, the rows that they make.

A request is read, its messages become tokens, and each answer that it wants is a turn of the policy in the rank's
`ConversationLoop`. A token that was sampled is never tokenised again: if a request repeats the policy's turns, its
tokens continue the sampled ones.
"""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from rlflow.environments.bridge import Bridge, Message, message
from rlflow.environments.session import Session, written
from rlflow.environments.tool_calls import ToolCall
from rlflow.errors import UserError, line_log, one_line, shown
from rlflow.harness.apis import APIS, Answer, ApiRequest, AssistantTurn, RequestError
from rlflow.harness.door import HttpAnswer
from rlflow.harness.harness import Harness
from rlflow.harness.tree import CallTokens, Tokens, rows_of
from rlflow.rollout.conversation import Conversation
from rlflow.rollout.conversation_loop import ConversationSteps
from rlflow.rollout.engine import Completion, GenerationRequest
from rlflow.values.path import hashed
from rlflow.values.rollout import Ending

log = line_log(__name__)

Schemas = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class EpisodeSettings:
    """Settings that all episodes of a rank have in common.

    Attributes:
        harness: The agent and its limits.
        policy: The policy whose answers become rows.
        policies: The policy that answers, and the temperature of its turns, by each name that a request may give.
        longest_prompt: Tokens that the first call of a row may read, at most.
        longest: Tokens after them, at most.
        bridge: The bridge that writes the turns of requests with these tools.
        ends: Tokens that end a turn.
        decode: Token ids to text.
    """

    harness: Harness
    policy: str
    policies: Mapping[str, tuple[str, float]]
    longest_prompt: int
    longest: int
    bridge: Callable[[Schemas], Bridge]
    ends: frozenset[int]
    decode: Callable[[Sequence[int]], str]


@dataclass(eq=False)
class Choice:
    """One answer that a request wants.

    Attributes:
        request: The request.
        number: Number among the answers of this episode to requests with the same tokens and settings.
        completion: The sampled tokens; None until then.
        stop: The request's text before which the answer ended; empty if it ended by itself.
        turn: The answer as a message; None until answers of lower numbers are known.
    """

    request: Request
    number: int
    completion: Completion | None = None
    stop: str = ""
    turn: AssistantTurn | None = None

    @property
    def sampled(self) -> CallTokens:
        """The tokens that were read and written."""
        assert self.completion is not None
        request = self.request
        return CallTokens(request.read, self.completion.token_ids, self.number, request.parsed.branch, request.settings)


@dataclass(eq=False)
class Request:
    """A request, and its answers.

    Attributes:
        path: Path of its API.
        parsed: The request as its API read it.
        policy: The policy that answers.
        bridge: The bridge that writes its turns.
        read: Tokens that the policy reads.
        settings: Digest of all that it asks for but its messages or prompt.
        so_far: Digest of its policy, tools and messages.
        first: Tokens of them that the first call of its row read.
        rewritten: Whether its messages repeat the policy's turns, and the chat template writes these in other words.
        ids: Ids of the request at the door; those of retries follow.
        choices: The answers that it wants.
        sent: Answer that was sent; None until then.
    """

    path: str
    parsed: ApiRequest
    policy: str
    bridge: Bridge
    read: Tokens
    settings: str
    so_far: str
    first: int
    rewritten: bool
    ids: list[int] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    sent: HttpAnswer | None = None

    @cached_property
    def place(self) -> str:
        """Digest of its tokens and settings; requests that share it are equal, and their answers are numbered."""
        return hashlib.blake2b(array("q", self.read).tobytes() + self.settings.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class EpisodeEnd:
    """The result of an episode.

    Attributes:
        rows: Rows of the episode, one or more.
        inherited: Number of the first tokens after the prompt that are those of an earlier row, by row.
        calls: Numbers in the episode of the calls that made the turns, by row; rows share some of them.
        refused: Number of requests that were refused.
        undelivered: Number of answers for which nobody waited any more; they are in no row.
        rewritten: Number of requests in which the chat template wrote the policy's earlier turns in other words.
    """

    rows: list[Conversation]
    inherited: list[int]
    calls: list[list[int]]
    refused: int
    undelivered: int
    rewritten: int


class Episode:
    """An episode in progress.

    Answers, tokens and rows are functions of the requests, not of the order in which they arrive: the seed of an answer
    follows from the tokens that are read, what the request asks for, and the answer's number among those to equal
    requests.

    Args:
        shared: Settings that all episodes have in common.
        number: Number of the episode among those from its row.
        session: Names the row in errors.
        prompt: Messages of the row's prompt, which stand in the row of an episode without calls.
        seed: Seed of the episode.
        answer: Sends the answer to the request with an id.
    """

    def __init__(
        self,
        shared: EpisodeSettings,
        number: int,
        session: Session,
        prompt: Sequence[Message],
        seed: int,
        answer: Callable[[int, HttpAnswer], None],
    ) -> None:
        self._refused = 0
        self._shared = shared
        self._number = number
        self._session = session
        self._prompt = prompt
        self._seed = seed
        self._answer = answer
        self._requests: list[Request] = []
        self._alike: dict[str, list[Choice]] = {}  # answers to equal requests, by `place`
        self._by_messages: dict[str, list[Choice]] = {}  # by the digest of tools and messages, the turn among them
        self._same: dict[str, list[Request]] = {}  # by `Idempotency-Key`, and by digest of the request
        self._digests: dict[str, str] = {}  # of the requests with each `Idempotency-Key`

    def __str__(self) -> str:
        return f"episode {self._number} of the row {self._session.row}"

    def arrived(self, sent: Mapping[str, Any]) -> list[ConversationSteps[None]]:
        """Take a request; returns a conversation of one turn for each answer that it wants."""
        try:
            request = self._read(sent)
        except RequestError as refused:
            return self._refuse(sent, refused)
        except Exception as error:  # nothing that a client sends ends the run
            return self._refuse(
                sent, RequestError(f"the request cannot be read ({one_line(error)})", code="invalid_value")
            )
        if sent["request"] not in request.ids:  # a retry
            request.ids.append(sent["request"])
            if request.sent is not None:
                self._answer(sent["request"], request.sent)
            return []
        self._requests.append(request)
        alike = self._alike.setdefault(request.place, [])
        request.choices = [Choice(request, len(alike) + place) for place in range(request.parsed.n)]
        alike += request.choices
        return [self._turn(choice) for choice in request.choices]

    def _refuse(self, sent: Mapping[str, Any], refused: RequestError) -> list[ConversationSteps[None]]:
        if not self._refused:
            text = "a request of the agent is refused: %s (%s); more of this episode are only counted"
            log.warning(text, shown(str(refused)), self)
        self._refused += 1
        self._answer(sent["request"], HttpAnswer(refused.status, APIS[sent["path"]].problem(refused)))
        return []

    def _read(self, sent: Mapping[str, Any]) -> Request:
        """The request that was sent; for a retry, the request that it repeats.

        Raises:
            RequestError: It cannot be served.
        """
        shared, harness = self._shared, self._shared.harness
        digest = _digest([sent["path"], sent["body"]])
        once = sent["once"] or digest
        same = self._same.setdefault(once, [])
        if same and self._digests[once] != digest:
            text = "the `Idempotency-Key` is that of another request of this episode; give each request its own"
            raise RequestError(text, status=409, code="idempotency_error")
        if same and (sent["once"] or sent["again"]):
            return next((request for request in same if request.sent is None), same[-1])
        temperatures = {name: temperature for name, (_, temperature) in shared.policies.items()}
        parsed = APIS[sent["path"]].read_request(sent["body"], temperatures, harness.ignore)
        policy, _ = shared.policies[parsed.model]
        made = sum(len(request.choices) for request in self._requests)
        if made + parsed.n > harness.max_calls:
            text = f"the episode has had {made} answers of at most {harness.max_calls} (`max_calls`)"
            raise RequestError(text, status=429, code="rate_limit_exceeded")
        digests = _digests(parsed, policy)
        asks = {name: value for name, value in vars(parsed).items() if name not in ("messages", "prompt")}
        settings = _digest([sent["path"], asks])
        try:
            bridge = shared.bridge(parsed.tools)
            read, first, rewritten = self._tokens(parsed, policy, settings, digests, bridge)
        except Exception as error:  # a template may fail in any way on a client's messages: not a fault of the run
            text = f"the model's family cannot write the {parsed.reads} ({one_line(error)})"
            raise RequestError(text, parsed.reads, code="invalid_value") from error
        if not shared.ends.issuperset(bridge.ends):
            raise RequestError(
                "the model's family ends turns that call tools by another token; leave tools out", "tools"
            )
        self._require_room(parsed.reads, len(read), first)
        request = Request(sent["path"], parsed, policy, bridge, read, settings, digests[-1], first, rewritten)
        request.ids.append(sent["request"])
        same.append(request)
        self._digests[once] = digest
        return request

    def _tokens(
        self, parsed: ApiRequest, policy: str, settings: str, digests: Sequence[str], bridge: Bridge
    ) -> tuple[Tokens, int, bool]:
        """The tokens of a request; how many of them the first call of its row read; and whether it is `rewritten`."""

        def order(choice: Choice) -> tuple[bool, bool, str, int, Tokens]:
            """Sort key for answers with the same words: own branch and own settings of the request come first."""
            request = choice.request
            other_branch = request.parsed.branch != parsed.branch
            return other_branch, request.settings != settings, request.settings, choice.number, request.read

        if parsed.prompt is not None:
            read = self._plain(parsed.prompt, sorted(self._of(policy), key=order), bridge)
            return read, self._first(read, policy), False
        messages, rewritten = [written(each) for each in _with_names(parsed.messages)], False
        for place in reversed(range(len(messages))):
            repeated, new = self._by_messages.get(digests[place + 1], ()), messages[place + 1 :]
            if repeated and not any(each["role"] == "assistant" for each in new):
                before = min(repeated, key=order)
                known = before.sampled
                rewritten = bridge.rewrites(messages[: place + 1], known.wrote, new)
                if rewritten:
                    break
                return (*known.whole, *bridge.after(new, known.wrote, known.read)), before.request.first, False
        read = tuple(bridge.begin(messages))
        return read, self._first(read, policy), rewritten

    def _of(self, policy: str) -> list[Choice]:
        """The answers of a policy so far."""
        choices = (choice for request in self._requests if request.policy == policy for choice in request.choices)
        return [choice for choice in choices if choice.turn is not None]

    def _plain(self, prompt: str | Tokens, choices: Sequence[Choice], bridge: Bridge) -> Tokens:
        """The tokens of a prompt without turns; a text continues the longest prompt and answer with which it begins.

        Of several with the same text that is the first of `choices`.
        """
        if not isinstance(prompt, str):
            return tuple(bridge.plain(prompt))
        before: Tokens = ()
        known = ""
        for choice in choices:
            prompt_text, (read, wrote) = choice.request.parsed.prompt, (choice.sampled.read, choice.sampled.wrote)
            response = self._shared.decode(wrote) if isinstance(prompt_text, str) else ""
            text = f"{prompt_text}{response}"
            if response and len(text) > len(known) and prompt.startswith(text):
                ended = wrote[-1:] and wrote[-1] in self._shared.ends  # by a token that no text has
                before, known = read + (wrote[:-1] if ended else wrote), text
        rest = prompt[len(known) :]
        return (*before, *bridge.plain(rest, begins=not known)) if rest else before

    def _first(self, read: Tokens, policy: str) -> int:
        """Number of these tokens that the first call of their row read."""
        longest = 0, -len(read)  # the tokens of the call that these continue, and the first read of its row
        for choice in self._of(policy):
            whole = choice.sampled.whole
            if read[: len(whole)] == whole:
                longest = max(longest, (len(whole), -choice.request.first))
        return -longest[1]

    def _require_room(self, field: str, length: int, first: int) -> None:
        """Refuse a prompt whose tokens leave the policy no room."""
        code = "context_length_exceeded"
        if first > self._shared.longest_prompt:
            most = self._shared.longest_prompt
            text = f"the request has {first} tokens, and `data.max_prompt_length` is {most}"
            raise RequestError(text, field, code=code)
        if length - first >= self._shared.longest:
            most = self._shared.longest
            text = f"the request has {length - first} tokens after those of the first call, and"
            raise RequestError(f"{text} `max_response_length` is {most}", field, code=code)

    def _turn(self, choice: Choice) -> ConversationSteps[None]:
        request = choice.request
        room = self._shared.longest - (len(request.read) - request.first)
        longest = min(room, request.parsed.longest or room)
        seed = hashed(f"{self._seed}/{request.place}/{choice.number}") >> 1
        completion: Completion = yield request.policy, GenerationRequest(request.read, seed, longest)
        choice.completion, choice.stop = self._stopped(completion, request.parsed.stop)
        self._answer_requests(self._alike[request.place])

    def _stopped(self, completion: Completion, stops: Sequence[str]) -> tuple[Completion, str]:
        """The sampled tokens up to the one that completes the first of these texts; and this text.

        The rest is as if it had not been sampled.
        """

        def found(length: int) -> str:
            text = self._shared.decode(completion.token_ids[:length])
            there = [stop for stop in stops if stop in text]
            return min(there, key=text.index) if there else ""

        lengths = range(len(completion.token_ids) + 1)
        length = bisect_left(lengths, True, key=lambda length: bool(found(length)))
        if not stops or length == len(lengths):
            return completion, ""
        cut = completion.token_ids[:length], completion.logprobs[:length]
        return Completion(*cut, finished=True), found(length)

    def _answer_requests(self, alike: Sequence[Choice]) -> None:
        """Answer equal requests whose answers are known, in the order of their numbers.

        So what a request repeats is known to be of the first answer with these words, whichever was sampled first.
        """
        for choice in alike:
            if choice.completion is None:
                break
            if choice.turn is None:
                choice.turn = self._assistant_turn(choice)
                digest = _digest([choice.request.so_far, choice.turn.message])
                self._by_messages.setdefault(digest, []).append(choice)
        for request in dict.fromkeys(choice.request for choice in alike):
            turns = [choice.turn for choice in request.choices if choice.turn is not None]
            if request.sent is None and len(turns) == request.parsed.n:
                request.sent = self._reply(request, turns)
                for id in request.ids:
                    self._answer(id, request.sent)

    def _assistant_turn(self, choice: Choice) -> AssistantTurn:
        """The policy's turn as text and calls of tools."""
        completion, request, tools = choice.completion, choice.request, choice.request.parsed.tools
        assert completion is not None
        reading = request.bridge.read(completion.token_ids, request.read)
        readable = tools and not any(call.problem for call in reading.calls) and _is_json(reading.calls)
        text, calls = (reading.text, reading.calls) if readable or not reading.calls else (reading.whole, ())
        if request.parsed.prompt is not None:
            text = reading.whole
        if choice.stop:
            text = text.partition(choice.stop)[0]
        name = _digest([self._seed, request.place, choice.number])
        calls = tuple(replace(each, id=each.id or f"{name[:8]}{i}") for i, each in enumerate(calls))
        turn = AssistantTurn(
            text, calls, not completion.finished, len(request.read), len(completion.token_ids), choice.stop
        )
        if not request.parsed.logprobs:
            return turn
        tokens = [self._shared.decode([token]) for token in completion.token_ids]
        return replace(turn, logprobs=tuple(zip(tokens, completion.logprobs, strict=True)))

    def _reply(self, request: Request, turns: Sequence[AssistantTurn]) -> HttpAnswer:
        api, first = APIS[request.path], request.choices[0].number
        name = _digest([self._seed, request.place, first])[:24]
        answer = Answer(name, request.parsed.model, int(time.time()), request.parsed, turns)
        return HttpAnswer(200, list(api.events(answer)) if request.parsed.stream else api.answer(answer))

    def steps(self, play: Callable[[], dict[str, Any]]) -> ConversationSteps[EpisodeEnd]:
        """The episode, until its agent has ended.

        Args:
            play: Runs the agent, see `rlflow.harness.harness.play`.

        Raises:
            UserError: The agent failed, where that ends the run.
        """
        played = yield play
        failed, on_failure = played.get("failed"), self._shared.harness.on_failure
        if failed is not None and on_failure == "raise":
            raise UserError(
                f"the harness `{self._shared.harness}` failed: {failed}; correct it, or set `on_failure` to zero or"
                f" mask ({self})"
            )
        end = self._end(played["delivered"], played.get("reward", 0.0), played.get("branches", {}))
        if failed is not None:
            log.warning("the harness `%s` failed: %s (%s)", self._shared.harness, failed, self)
            for row in end.rows:
                row.end(Ending.FAILED, f"the agent failed: {shown(failed)}")
                if on_failure == "mask":
                    row.written = [False] * len(row.written)
        return end

    def _end(self, delivered: Sequence[int], reward: float, branches: Mapping[str, float]) -> EpisodeEnd:
        """The rows of delivered answers; the last turn gets the reward of its branch, or of the whole episode."""
        there = set(delivered)
        of_policy = [request for request in self._requests if request.policy == self._shared.policy]
        wanted = [choice for request in of_policy for choice in request.choices]
        choices = [each for each in wanted if each.turn is not None and there.intersection(each.request.ids)]
        rewritten = sum(request.rewritten for request in of_policy)
        end = EpisodeEnd([], [], [], self._refused, len(wanted) - len(choices), rewritten)
        numbers: dict[int, int] = {}  # in the order of rows, which does not depend on when calls came
        for row in rows_of([choice.sampled for choice in choices]):
            turns = [choices[turn] for turn in row.turns]
            end.rows.append(self._row(turns, row.trained, branches.get(turns[-1].request.parsed.branch, reward)))
            end.inherited.append(row.inherited)
            end.calls.append([numbers.setdefault(turn, len(numbers)) for turn in row.turns])
        if not choices:
            bridge, messages = self._shared.bridge(()), list(self._prompt)
            silent = Conversation(
                self._session, bridge, bridge.begin(messages), messages, segments=[0], rewards=[reward]
            )
            silent.end(Ending.DONE, "the agent called for nothing")
            end.rows.append(silent)
            end.inherited.append(0)
            end.calls.append([])
        if len(end.rows) > 1:
            whole = [(*view.prompt, *view.tokens) for view in end.rows]
            for number, (view, inherited) in enumerate(zip(end.rows, end.inherited, strict=True), 1):
                view.why += f"; row {number} of {len(end.rows)} of the episode"
                if inherited:
                    begun = (*view.prompt, *view.tokens[:inherited])
                    first = next(place for place, tokens in enumerate(whole, 1) if tokens[: len(begun)] == begun)
                    view.why += f", which begins with {inherited} tokens of row {first}"
        return end

    def _row(self, turns: Sequence[Choice], trained: Sequence[bool], reward: float) -> Conversation:
        last = turns[-1]
        assert last.turn is not None
        prompt = turns[0].sampled.read
        parsed = last.request.parsed
        read = parsed.messages if parsed.prompt is None else [message("user", self._shared.decode(last.request.read))]
        messages = [_shown(each) for each in (*read, last.turn.message)]
        row = Conversation(self._session, last.request.bridge, list(prompt), messages)
        for turn, counts in zip(turns, trained, strict=True):
            if row.segments:
                between = turn.sampled.read[len(prompt) + len(row.tokens) :]
                row.add_answer(between, [])
            assert turn.completion is not None
            row.add_turn(turn.completion)
            if not counts:
                length = len(turn.completion.token_ids)
                row.written[-length:] = [False] * length
        row.rewards[-1] = reward
        if row.cut and len(row.tokens) >= self._shared.longest:
            row.end(Ending.TOKENS, "its last turn was cut at `max_response_length`")
        else:
            row.end(Ending.DONE, "the agent ended it")
        row.calls = sum(len(each.turn.calls) for each in turns if each.turn is not None)
        return row


def _with_names(messages: Sequence[Message]) -> list[Message]:
    """The messages, with the name of the tool in each tool's answer; APIs give only the id of the call."""
    names: dict[str, str] = {}
    named = []
    for each in messages:
        names |= {call["id"]: call["function"]["name"] for call in each.get("tool_calls", ()) if call["id"]}
        known = {"name": names[each["tool_call_id"]]} if each.get("tool_call_id") in names else {}
        named.append({**known, **each})
    return named


def _is_json(calls: Sequence[ToolCall]) -> bool:
    """Whether calls can be sent: JSON in UTF-8 has no NaN, no infinity and no half characters."""
    try:
        json.dumps([(call.name, call.arguments) for call in calls], allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return False
    return True


def _shown(sent: Message) -> Message:
    """A message as people read it: calls stand in the text too."""
    if not sent.get("tool_calls"):
        return sent
    calls = [
        {"id": each["id"], "name": each["function"]["name"], "arguments": each["function"]["arguments"]}
        for each in sent["tool_calls"]
    ]
    lines = [sent["content"], *(f"{call['name']}({json.dumps(call['arguments'])})" for call in calls)]
    return {**sent, "content": "\n".join(filter(None, lines)), "tool_calls": calls}


def _digests(parsed: ApiRequest, policy: str) -> list[str]:
    """Digests of policy and tools (and the prompt without messages), of these with the first message, and so on."""
    digests = [_digest([policy, *parsed.tools, parsed.prompt])]
    for each in parsed.messages:
        digests.append(_digest([digests[-1], each]))
    return digests


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
