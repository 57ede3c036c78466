"""A conversation of a policy with an environment: its record, its turns (`converse`), and its row of a `Rollout`.

In a game of several seats (`play_game`) each seat has a conversation, its view. Nothing here knows ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

from rlflow.environments.bridge import Bridge, Message, ParsedTurn, message
from rlflow.environments.environment import OnFailure
from rlflow.environments.host import HostError
from rlflow.environments.session import Move, Reply, Session
from rlflow.errors import UserError, shown
from rlflow.rollout.conversation_loop import ConversationSteps
from rlflow.rollout.engine import Completion, GenerationRequest
from rlflow.values.path import RowPath
from rlflow.values.ragged import Ragged
from rlflow.values.rollout import Ending, Rollout

PROGRESS = ("draw", "rewards", "calls", "failed", "why", "cut", "state")  # stored of a conversation, see `_progress`


@dataclass
class Conversation:
    """One conversation in its present state.

    The policy writes 3 tokens, the environment answers with 5, and the policy writes 2 more: `segments` is `[3, 5, 2]`,
    `tokens`, `logprobs` and `written` have 10 entries, `written` is False at places 3 to 7, and `rewards` has 2.

    Attributes:
        session: Session of its environment.
        bridge: Bridge that writes its turns.
        prompt: Token ids of the first turn's prompt.
        messages: All messages, those of the prompt among them.
        tokens: Token ids after the prompt, of the policy and of the environment.
        logprobs: Log-probability of each token; 0 where the environment wrote it.
        written: Whether the policy wrote each token.
        segments: Number of tokens of each turn of the policy and of each answer to it, one after another.
        rewards: Rewards of each turn of the policy.
        ended: Reason why it is over; None as long as it is not.
        why: The reason in words.
        cut: Whether the last turn of the policy was cut at its longest length.
        seat: Number of the seat that has this view, among the environment's seats.
        calls: Number of calls of tools.
        failed: Number of calls of tools that gave no value.
        turn_open: Whether the last turn was cut off and is to be continued.
        sampled: Tokens that the policy wrote in this call of `converse`.
        versions: Versions of the policy, of each token that was there before this call.
        draw: Number of draws of prompts before it began.
        state: State of its environment where it was cut off, see `Session.state`; None where that stays as it is.
        was_over: Whether it was over before this call.
        restarted: Whether it was cut off and its environment is gone, so that it began once more.
    """

    session: Session
    bridge: Bridge
    prompt: list[int]
    messages: list[Message]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    ended: Ending | None = None
    why: str = ""
    cut: bool = False
    seat: int = 0
    calls: int = 0
    failed: int = 0
    turn_open: bool = False
    sampled: int = 0
    versions: list[int] = field(default_factory=list)
    draw: int = 0
    state: dict[str, Any] | None = None
    was_over: bool = False
    restarted: bool = False

    @property
    def turns(self) -> int:
        """Turns of the policy so far."""
        return len(self.rewards)

    @property
    def last_turn(self) -> tuple[list[int], list[int]]:
        """Tokens of the policy's last turn, and all tokens before it, including the prompt."""
        last = max(0, len(self.segments) - 1) // 2 * 2  # segments are turns and answers, one after another
        start = sum(self.segments[:last])
        return self.tokens[start : start + sum(self.segments[last : last + 1])], self.prompt + self.tokens[:start]

    def add_turn(self, completion: Completion, ends: bool = True) -> None:
        """Add a turn of the policy, or the continuation of an open turn; it stays open unless it `ends`."""
        length = len(completion.token_ids)
        self.tokens += completion.token_ids
        self.logprobs += completion.logprobs
        self.written += [True] * length
        if self.turn_open:
            self.segments[-1] += length
        else:
            self.segments.append(length)
            self.rewards.append(0.0)
        self.sampled += length
        self.cut = not completion.finished
        self.turn_open = not ends

    def add_answer(self, tokens: Sequence[int], messages: Sequence[Message]) -> None:
        """Add an answer of the environment."""
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.written += [False] * len(tokens)
        self.segments.append(len(tokens))
        self.messages += messages

    def end(self, ended: Ending, why: str) -> None:
        """Note that and why it is over."""
        self.ended, self.why = ended, why


@dataclass(frozen=True)
class Rules:
    """The policy of a conversation, and its limits.

    Attributes:
        policy: The policy that takes the turns.
        max_turns: Turns of the policy, at most.
        longest_prompt: Tokens of the first prompt, at most.
        longest: Tokens after the prompt, at most: the policy's and the environment's together.
        longest_turn: Tokens of a turn of the policy, at most.
        budget: Tokens of the policy in one call, after which a conversation is cut off; None where none is.
        on_failure: Treatment of a conversation whose environment failed, see `Environment`.
    """

    policy: str
    max_turns: int
    longest_prompt: int
    longest: int
    longest_turn: int
    on_failure: OnFailure = "raise"
    budget: int | None = None


def converse(
    session: Session,
    bridge: Bridge,
    prompt: Sequence[Message],
    row: dict[str, Any],
    seed_of: Callable[[int], int],
    rules: Rules,
    begun: Conversation | None = None,
) -> ConversationSteps[Conversation]:
    """A conversation, from the messages of its prompt or from where it was cut off, to its end or to its next cut.

    Args:
        session: Session of its environment.
        bridge: Bridge that writes its turns.
        prompt: Prompt of the dataset's row.
        row: Row of the dataset, with all columns.
        seed_of: The seed of each turn.
        rules: Limits of the conversation.
        begun: The conversation as far as it got; None where it begins.

    Raises:
        UserError: The environment failed, or gave something other than a message and a reward, where that ends the
            run; does not take the row; or makes a prompt that is longer than prompts may be.
    """
    conversation = begun
    try:
        if conversation is None:
            messages = yield partial(session.begin, prompt, row)
            conversation = _new_conversation(session, bridge, messages, rules)
        if conversation.state is not None:
            state, conversation.state = conversation.state, None
            yield partial(session.restore, state)
        while conversation.ended is None:
            if not (yield from _take_turn(conversation, seed_of, rules)):
                conversation.state = (yield session.state) if session.definition.keeps_state else None
                break
            yield from _answer(conversation, rules)
    except HostError as error:
        conversation = conversation or _new_conversation(session, bridge, prompt, rules)
        _fail(conversation, error, rules)
    return conversation


def _new_conversation(session: Session, bridge: Bridge, messages: Sequence[Message], rules: Rules) -> Conversation:
    """A conversation that begins with these messages.

    Raises:
        UserError: They are longer than prompts may be.
    """
    with session.of_row():
        conversation = Conversation(session, bridge, bridge.begin(messages), list(messages))
        if len(conversation.prompt) > rules.longest_prompt:
            raise UserError(
                f"a conversation begins with {len(conversation.prompt)} tokens (messages, tools and the answer of"
                f" `reset`), and `data.max_prompt_length` is {rules.longest_prompt}, for which memory is planned; raise"
                " it"
            )
    return conversation


def _take_turn(conversation: Conversation, seed_of: Callable[[int], int], rules: Rules) -> ConversationSteps[bool]:
    """Let the policy take its turn, or continue an open turn; returns whether the turn has ended."""
    number, said = conversation.turns, 0
    if conversation.turn_open:
        number, said = number - 1, conversation.segments[-1]
    longest = min(rules.longest_turn - said, rules.longest - len(conversation.tokens))
    if longest <= 0:  # it was cut off under larger limits
        conversation.add_turn(Completion((), (), finished=False))
        return True
    may = longest if rules.budget is None else min(longest, rules.budget - conversation.sampled)
    if not may:
        return False
    read = conversation.prompt + conversation.tokens
    completion: Completion = yield (
        rules.policy,
        GenerationRequest(read, seed_of(number), may, conversation.bridge.pictures),
    )
    ends = completion.finished or len(completion.token_ids) == longest
    conversation.add_turn(completion, ends)
    return ends


def _parse_turn(conversation: Conversation) -> ParsedTurn:
    """The policy's last turn, parsed; it is added to the messages."""
    parsed = conversation.bridge.read(*conversation.last_turn)
    calls = {"tool_calls": [asdict(call) for call in parsed.calls]} if parsed.calls else {}
    conversation.messages.append(message("assistant", parsed.whole, **calls))
    return parsed


def _add_answer(conversation: Conversation, messages: Sequence[Message], rules: Rules) -> None:
    """Give the policy messages to read before its next turn; or end, if it has no such turn."""
    with conversation.session.of_row(turn=conversation.turns):
        ids = conversation.bridge.after(messages, *conversation.last_turn)
    if len(conversation.tokens) + len(ids) >= rules.longest:
        conversation.end(Ending.TOKENS, _no_room(conversation, rules))
    elif conversation.turns == rules.max_turns:
        conversation.end(Ending.TURNS, f"the policy had {rules.max_turns} turns, as many as `max_turns` allows")
    else:
        conversation.add_answer(ids, messages)
        return
    conversation.messages += _unread(messages)


def _no_room(conversation: Conversation, rules: Rules) -> str:
    if len(conversation.tokens) >= rules.longest:
        return f"the policy's turn reached `max_response_length`, {rules.longest} tokens of the whole conversation"
    return f"what the environment said leaves the policy no room within `max_response_length`, {rules.longest} tokens"


def _unread(messages: Sequence[Message]) -> list[Message]:
    """Messages after the last turn, marked as such: no policy reads them, but people do."""
    return [{**each, "unread": True} for each in messages]


def _answer(conversation: Conversation, rules: Rules) -> ConversationSteps[None]:
    """Let the environment answer the last turn; if that ends the conversation, ask for its reward."""
    given = yield partial(_reply, conversation, _parse_turn(conversation))
    reply = Reply(**given)
    conversation.rewards[-1] += reply.reward
    conversation.calls += reply.calls
    conversation.failed += reply.failed
    if reply.done:
        conversation.end(*_ending(reply, conversation.cut))
        conversation.messages += _unread(reply.messages)
    else:
        _add_answer(conversation, reply.messages, rules)
    if conversation.ended is not None:
        reward = yield conversation.session.reward
        conversation.rewards[-1] += reward or 0.0


def _reply(conversation: Conversation, parsed: ParsedTurn) -> dict[str, Any]:
    if conversation.cut:  # so that it is not taken for bad JSON
        length = conversation.segments[-1]
        calls = (
            replace(call, problem=f"{call.problem} (the turn was cut at {length} tokens)") if call.problem else call
            for call in parsed.calls
        )
        parsed = replace(parsed, calls=tuple(calls))
    return asdict(conversation.session.answer(parsed, conversation.turns))


def _ending(reply: Reply, cut: bool) -> tuple[Ending, str]:
    """Ending of a conversation, with its reason. A turn that was cut might have gone on to call a tool."""
    if reply.over == "limit":
        return Ending.TURNS, "as many tools were called as `max_tool_calls` allows"
    if reply.over == "environment":
        return Ending.DONE, "the environment ended it"
    if cut:
        return Ending.TOKENS, "the policy's turn was cut at its longest length before it called a tool"
    return Ending.DONE, "the policy called no tool"


def _fail(conversation: Conversation, error: HostError, rules: Rules) -> None:
    """End a conversation after its environment failed.

    Raises:
        UserError: `on_failure` is `raise`.
    """
    if rules.on_failure == "raise":
        raise UserError(
            f"the environment {conversation.session} failed at turn {conversation.turns}: {error}; correct it, or set"
            f" `on_failure` to zero or mask (the row is {conversation.session.row})"
        ) from error
    if conversation.turn_open:
        _parse_turn(conversation)
        conversation.turn_open = False
    conversation.end(Ending.FAILED, f"the environment failed: {shown(str(error))}")
    conversation.rewards = [0.0] * conversation.turns
    if rules.on_failure == "mask":
        conversation.written = [False] * len(conversation.written)


def play_game(
    game: Session,
    bridge: Bridge,
    prompt: Sequence[Message],
    row: dict[str, Any],
    seed_of: Callable[[str, int], int],
    rules: Mapping[str, Rules],
) -> ConversationSteps[dict[str, Conversation]]:
    """A game, from the messages of its prompt to its end: the conversation of each seat, by name.

    One seat speaks at a time. The messages for the others are added to their conversations before their next turn. A
    seat that never had a turn gets one without tokens, for its reward.

    Args:
        game: Session of its environment.
        bridge: Bridge that writes the turns of all seats.
        prompt: Prompt of the dataset's row.
        row: Row of the dataset, with all columns.
        seed_of: The seed of each turn, given the seat and its number among those of this seat.
        rules: Limits of each seat's conversation, and who speaks in it.

    Raises:
        UserError: For the reasons of `converse`.
    """
    table = _Table(game, bridge, prompt, rules)
    try:
        first = yield partial(_begin_game, game, prompt, row)
        table.prompt, move = first["prompt"], Move(**first["move"])
        while not move.done:
            speaking = table.reads(move)
            if speaking.ended is not None:
                break
            yield from _take_turn(speaking, partial(seed_of, move.seat), rules[move.seat])
            moved = yield partial(_move, game, _parse_turn(speaking).text, move.seat, speaking.turns)
            move = Move(**moved)
            table.reward(move.rewards)
        table.reward((yield game.rewards))
    except HostError as error:
        return table.failed(error)
    return table.over()


def _begin_game(game: Session, prompt: Sequence[Message], row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": game.begin(prompt, row), "move": asdict(game.first_move())}


def _move(game: Session, text: str, seat: str, turn: int) -> dict[str, Any]:
    return asdict(game.move(text, seat, turn))


class _Table:
    """The conversations of a game.

    Attributes:
        prompt: Messages with which each seat begins.
    """

    def __init__(self, game: Session, bridge: Bridge, prompt: Sequence[Message], rules: Mapping[str, Rules]) -> None:
        self.prompt = prompt
        self._game = game
        self._bridge = bridge
        self._rules = rules
        self._seats: dict[str, Conversation] = {}
        self._rewards = dict.fromkeys(rules, 0.0)  # not yet given to a turn

    def reads(self, move: Move) -> Conversation:
        """The conversation of the seat that speaks next, with its new messages; over if there is no room for these."""
        if move.seat in self._seats:
            conversation = self._seats[move.seat]
            _add_answer(conversation, move.messages, self._rules[move.seat])
            return conversation
        if self._too_late(move):
            conversation = self._seated(move.seat, ())
            conversation.end(Ending.TOKENS, "what it reads before its first turn is longer than prompts may be")
            conversation.messages += _unread(move.messages)
            return conversation
        return self._seated(move.seat, move.messages)

    def _too_late(self, move: Move) -> bool:
        """Whether the other seats' turns made this seat's prompt too long before its first turn."""
        if not any(each.turns for each in self._seats.values()):
            return False
        with self._game.of_row():
            prompt = self._bridge.begin([*self.prompt, *move.messages])
        return len(prompt) > self._rules[move.seat].longest_prompt

    def reward(self, rewards: Mapping[str, float]) -> None:
        """Add these rewards to the last turns of their seats."""
        for seat, reward in rewards.items():
            self._rewards[seat] += reward
        for seat, conversation in self._seats.items():
            if conversation.turns:
                conversation.rewards[-1] += self._rewards[seat]
                self._rewards[seat] = 0.0

    def over(self) -> dict[str, Conversation]:
        """All conversations, each with its end: the end of the seat that could not continue, if there is one."""
        views = self._seats.values()
        cut = ((each.ended, f"another seat ended it: {each.why}") for each in views if each.ended is not None)
        end = next(cut, (Ending.DONE, "the environment ended it"))
        for seat in self._rules:
            conversation = self._seats.get(seat) or self._seated(seat, ())
            if not conversation.turns:
                conversation.segments, conversation.rewards = [0], [self._rewards[seat]]
            if conversation.ended is None:
                conversation.end(*end)
        return {seat: self._seats[seat] for seat in self._rules}

    def failed(self, error: HostError) -> dict[str, Conversation]:
        """All conversations, each ended by a failure of the environment."""
        for seat, rules in self._rules.items():
            _fail(self._seats.get(seat) or self._seated(seat, ()), error, rules)
        return {seat: self._seats[seat] for seat in self._rules}

    def _seated(self, seat: str, messages: Sequence[Message]) -> Conversation:
        conversation = _new_conversation(self._game, self._bridge, [*self.prompt, *messages], self._rules[seat])
        conversation.seat = list(self._rules).index(seat)
        self._seats[seat] = conversation
        return conversation


def add_group_rewards(
    session: Session, group: Sequence[Conversation], row: dict[str, Any], rules: Rules
) -> ConversationSteps[None]:
    """Ask the environment for the rewards of a group, and add them to the last turns.

    Args:
        session: Session of the group's environment, on a host that no conversation uses.
        group: Conversations from one row; none of them failed.
        row: Row of the dataset.
        rules: Limits of the conversations.

    Raises:
        UserError: The environment failed, where that ends the run; or gave something other than numbers.
    """
    seats = session.definition.seats or ("",)
    given = [
        {"messages": each.messages, "rewards": each.rewards, "row": row, "seat": seats[each.seat]} for each in group
    ]
    try:
        rewards = yield partial(session.group_rewards, given)
    except HostError as error:
        for conversation in group:
            _fail(conversation, error, rules)
        return
    for conversation, reward in zip(group, rewards, strict=True):
        conversation.rewards[-1] += reward


def to_rollout(
    conversations: Sequence[Conversation],
    path: RowPath,
    rows: Sequence[dict[str, Any]],
    version: int,
    decode: Callable[[Sequence[int]], str],
    dtype: torch.dtype,
    cut_off: bool = False,
    pictures: Ragged | None = None,
) -> Rollout:
    """Conversations in their present state as a rollout, on the CPU.

    Args:
        conversations: `B` of them.
        path: Path of each.
        rows: The dataset's row of each.
        version: Version of the policy, for tokens without a version in their conversation.
        decode: Function from token ids to the text of the policy's last turn.
        dtype: Dtype of log-probabilities and rewards.
        cut_off: Whether some may be continued.
        pictures: Numbers of the pictures of each prompt, see `Batch`; None where no prompt has any.
    """
    responses = Ragged.from_lists([each.tokens for each in conversations])
    versions = [[*each.versions, *[version] * (len(each.tokens) - len(each.versions))] for each in conversations]
    ended = torch.tensor([Ending.TOKENS if each.ended is None else each.ended for each in conversations]).long()
    rollout = Rollout(
        prompt_ids=Ragged.from_lists([each.prompt for each in conversations]),
        response_ids=responses.padded(),
        loss_mask=Ragged.from_lists([each.written for each in conversations], torch.bool).padded(),
        lengths=responses.lengths,
        logprobs=Ragged.from_lists([each.logprobs for each in conversations], dtype).padded(),
        finished=ended != Ending.TOKENS,
        path=path,
        version=torch.tensor([each[0] if each else version for each in versions]).long(),  # versions only grow
        versions=Ragged.from_lists(versions, torch.int32).padded(),
        segments=Ragged.from_lists([each.segments for each in conversations]),
        turn_rewards=Ragged.from_lists([each.rewards for each in conversations], dtype),
        ended=ended,
        seat=torch.tensor([each.seat for each in conversations]).long(),
        texts=[decode(each.last_turn[0]) for each in conversations],
        messages=[messages_of(each) for each in conversations],
        rows=list(rows),
        progress=[_progress(each) if cut_off else {} for each in conversations],
    )
    return rollout if pictures is None else replace(rollout, pictures=pictures)


def from_rollout(rollout: Rollout, row: int, session: Session, bridge: Bridge) -> Conversation:
    """The conversation of a row that may be cut off, to be continued or as it ended.

    Args:
        rollout: Result of `to_rollout`, on the CPU.
        row: Row of the rollout.
        session: Session of the conversation's environment.
        bridge: Bridge that writes its turns.
    """
    progress, length = rollout.progress[row], int(rollout.lengths[row])
    segments = rollout.segments.rows()[row].tolist()
    written = rollout.loss_mask[row, :length].tolist()
    if not progress["over"]:  # the mask may leave out what is not finished
        written = [turn % 2 == 0 for turn, count in enumerate(segments) for _ in range(count)]
    return Conversation(
        session,
        bridge,
        prompt=rollout.prompt_ids.rows()[row].tolist(),
        messages=list(rollout.messages[row]),
        tokens=rollout.response_ids[row, :length].tolist(),
        logprobs=rollout.logprobs[row, :length].tolist(),
        written=written,
        segments=segments,
        ended=Ending(int(rollout.ended[row])) if progress["over"] else None,
        seat=int(rollout.seat[row]),
        turn_open=not progress["over"] and len(segments) % 2 == 1,  # segments are turns and answers, one after another
        versions=rollout.versions[row, :length].tolist(),
        was_over=progress["over"],
        **deepcopy({name: progress[name] for name in PROGRESS}),
    )


def _progress(conversation: Conversation) -> dict[str, Any]:
    """The part of a conversation's state that other columns do not hold, to continue it.

    `draw` is how often prompts were drawn before it began, `rewards` are of its turns, and `state` is of its
    environment, null where it has none to give.
    """
    return {"over": conversation.ended is not None, **{name: getattr(conversation, name) for name in PROGRESS}}


def messages_of(conversation: Conversation) -> list[dict[str, Any]]:
    """The messages, with the rewards of the policy's turns, and why the conversation is over.

    A seat that never spoke has a reward, and no message of its own for it.
    """
    messages = [dict(each) for each in conversation.messages]
    if conversation.ended is None:
        return messages
    spoken = [each for each in messages if each["role"] == "assistant"]  # examples in a prompt come before turns
    rewards = conversation.rewards if conversation.tokens else []
    for each, reward in zip(reversed(spoken), reversed(rewards), strict=False):
        each["reward"] = reward
    if messages:
        messages[-1]["ended"] = conversation.why
    return messages
