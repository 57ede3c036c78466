"""`converse`: a conversation of a policy with an environment, turn by turn. Knows no ranks and no other of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from rlflow.environments.bridge import Bridge, Message, ParsedTurn, message
from rlflow.environments.environment import OnFailure
from rlflow.environments.host import HostError
from rlflow.environments.session import EnvironmentSession, Reply, Session
from rlflow.errors import UserError, shown
from rlflow.rollout.conversation import Conversation
from rlflow.rollout.conversation_loop import ConversationSteps, EnvironmentCall, PolicyTurn
from rlflow.rollout.engine import Completion
from rlflow.rollout.request import Turn
from rlflow.values.rollout import Ending


@dataclass(frozen=True)
class Rules:
    """How conversations go.

    Attributes:
        policy: Whose turns they have.
        max_turns: Of the policy, at most.
        longest_prompt: Tokens of the first prompt, at most.
        longest: Tokens after the prompt, at most: the policy's and the environment's.
        longest_turn: Tokens of a turn of the policy, at most.
        budget: Tokens of the policy in one call, after which a conversation is cut off; None where none is.
        on_failure: What becomes of a conversation whose environment failed, see `Environment`.
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
        session: With its environment.
        bridge: Writes its turns.
        prompt: Of the dataset's row.
        row: All of its columns.
        seed_of: The seed of each turn.
        rules: How it goes.
        begun: As far as it got; None where it begins.

    Raises:
        UserError: The environment failed, where that ends the run; does not take the row; makes a prompt that is longer
            than prompts may be; or gave what is no message or no reward.
    """
    if begun is None:
        conversation = yield from _begin(session, bridge, prompt, row, rules)
    else:
        conversation = yield from _continue(session, begun, rules)
    while conversation.ended is None:
        if not (yield from take_turn(conversation, seed_of, rules)):
            yield from _cut_off(session, conversation, rules)
            break
        yield from _answer(session, conversation, rules)
    return conversation


def new_conversation(
    session: EnvironmentSession, bridge: Bridge, messages: Sequence[Message], rules: Rules
) -> Conversation:
    """A conversation that begins with these messages.

    Raises:
        UserError: They are longer than prompts may be.
    """
    with session.of_row():
        conversation = Conversation(session, bridge, bridge.begin(messages), list(messages))
        if len(conversation.prompt) > rules.longest_prompt:
            raise UserError(
                f"a conversation begins with {len(conversation.prompt)} tokens, of messages, tools and what `reset`"
                f" says, and `data.max_prompt_length` is {rules.longest_prompt}, for which memory is planned; raise it"
            )
    return conversation


def take_turn(conversation: Conversation, seed_of: Callable[[int], int], rules: Rules) -> ConversationSteps[bool]:
    """Let the policy take its turn, or the rest of one that is open; whether the turn has ended."""
    number, said = conversation.turns, 0
    if conversation.turn_open:
        number, said = number - 1, conversation.segments[-1]
    longest = min(rules.longest_turn - said, rules.longest - len(conversation.tokens))
    may = longest if rules.budget is None else min(longest, rules.budget - conversation.sampled)
    if not may:
        return False
    read = conversation.prompt + conversation.tokens
    completion: Completion = yield PolicyTurn(rules.policy, Turn(read, seed_of(number), may))
    ends = completion.finished or len(completion.token_ids) == longest
    conversation.add_turn(completion, ends)
    return ends


def parse_turn(conversation: Conversation) -> ParsedTurn:
    """What the policy said in its last turn; it is added to the messages."""
    parsed = conversation.bridge.read(*_last_turn(conversation))
    calls = {"tool_calls": [asdict(call) for call in parsed.calls]} if parsed.calls else {}
    conversation.messages.append(message("assistant", parsed.whole, **calls))
    return parsed


def add_answer(conversation: Conversation, messages: Sequence[Message], rules: Rules) -> None:
    """Let the policy read these messages before its next turn; or end, where it has no such turn."""
    with conversation.session.of_row(turn=conversation.turns - 1):
        ids = conversation.bridge.after(messages, *_last_turn(conversation))
    if len(conversation.tokens) + len(ids) >= rules.longest:
        conversation.end(Ending.TOKENS, _no_room(conversation, rules))
    elif conversation.turns == rules.max_turns:
        conversation.end(Ending.TURNS, f"the policy had {rules.max_turns} turns, as many as `max_turns` allows")
    else:
        conversation.add_answer(ids, messages)
        return
    conversation.messages += unread(messages)


def _no_room(conversation: Conversation, rules: Rules) -> str:
    if len(conversation.tokens) >= rules.longest:
        return f"the policy's turn reached `max_response_length`, {rules.longest} tokens of the whole conversation"
    return f"what the environment said leaves the policy no room within `max_response_length`, {rules.longest} tokens"


def unread(messages: Sequence[Message]) -> list[Message]:
    """Messages that come after the last turn: no policy reads them, people do."""
    return [{**each, "unread": True} for each in messages]


def _begin(
    session: Session, bridge: Bridge, prompt: Sequence[Message], row: dict[str, Any], rules: Rules
) -> ConversationSteps[Conversation]:
    messages = yield EnvironmentCall(partial(session.begin, prompt, row))
    failed = isinstance(messages, HostError)
    conversation = new_conversation(session, bridge, prompt if failed else messages, rules)
    if failed:
        fail(conversation, messages, rules)
    return conversation


def _cut_off(session: Session, conversation: Conversation, rules: Rules) -> ConversationSteps[None]:
    """Take the state of the environment, where it offers that."""
    if session.keeps_state:
        state = yield EnvironmentCall(session.state)
        if isinstance(state, HostError):
            fail(conversation, state, rules)
        else:
            conversation.state = state


def _continue(session: Session, conversation: Conversation, rules: Rules) -> ConversationSteps[Conversation]:
    """Bring the environment to where it was, unless it still is there."""
    state, conversation.state = conversation.state, None
    if state is not None:
        restored = yield EnvironmentCall(partial(session.restore, state))
        if isinstance(restored, HostError):
            fail(conversation, restored, rules)
    return conversation


def _answer(session: Session, conversation: Conversation, rules: Rules) -> ConversationSteps[None]:
    """Let the environment answer the turn that was taken; where that ends the conversation, ask for its reward."""
    reply = yield EnvironmentCall(partial(_reply, session, conversation, parse_turn(conversation)))
    if isinstance(reply, HostError):
        fail(conversation, reply, rules)
        return
    _add_reply(conversation, Reply(**reply), rules)
    if conversation.ended is None:
        return
    reward = yield EnvironmentCall(session.reward)
    if isinstance(reward, HostError):
        fail(conversation, reward, rules)
    else:
        conversation.rewards[-1] += reward or 0.0


def _reply(session: Session, conversation: Conversation, parsed: ParsedTurn) -> dict[str, Any]:
    if conversation.cut:  # so that it is not taken for bad JSON
        length = conversation.segments[-1]
        calls = (
            replace(call, problem=f"{call.problem} (the turn was cut at {length} tokens)") if call.problem else call
            for call in parsed.calls
        )
        parsed = replace(parsed, calls=tuple(calls))
    return asdict(session.answer(parsed, conversation.turns - 1))


def _last_turn(conversation: Conversation) -> tuple[list[int], list[int]]:
    """Token ids of the policy's last turn, and of all before it."""
    length = conversation.segments[-1]
    before = conversation.tokens[: len(conversation.tokens) - length]
    return conversation.tokens[len(before) :], conversation.prompt + before


def _add_reply(conversation: Conversation, reply: Reply, rules: Rules) -> None:
    """Add what the environment answered, or end."""
    conversation.rewards[-1] += reply.reward
    conversation.calls += reply.calls
    conversation.failed += reply.failed
    if reply.done:
        conversation.end(*_ending(reply, conversation.cut))
        conversation.messages += unread(reply.messages)
    else:
        add_answer(conversation, reply.messages, rules)


def _ending(reply: Reply, cut: bool) -> tuple[Ending, str]:
    """Why a conversation is over; a turn that was cut before it called a tool might have gone on to."""
    if reply.over == "limit":
        return Ending.TURNS, "as many tools were called as `max_tool_calls` allows"
    if reply.over == "environment":
        return Ending.DONE, "the environment ended it"
    if cut:
        return Ending.TOKENS, "the policy's turn was cut at its longest length before it called a tool"
    return Ending.DONE, "the policy called no tool"


def fail(conversation: Conversation, error: HostError, rules: Rules) -> None:
    """End a conversation whose environment failed.

    Raises:
        UserError: That ends the run.
    """
    if rules.on_failure == "raise":
        raise UserError(
            f"the environment {conversation.session} failed at turn {conversation.turns}: {error}; mend it, or set"
            f" `on_failure` to zero or mask (the row is {conversation.session.row})"
        ) from error
    if conversation.turn_open:
        parse_turn(conversation)
        conversation.turn_open = False
    conversation.end(Ending.FAILED, f"the environment failed: {shown(str(error))}")
    conversation.rewards = [0.0] * conversation.turns
    if rules.on_failure == "mask":
        conversation.written = [False] * len(conversation.written)
