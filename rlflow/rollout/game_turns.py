"""`play_game`, a game of several seats, turn by turn: each seat has a conversation, its view. Knows no ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rlflow.environments.bridge import Bridge, Message
from rlflow.environments.host import HostError
from rlflow.environments.session import GameSession, Move
from rlflow.rollout.conversation import (
    Conversation,
    Rules,
    add_answer,
    fail,
    new_conversation,
    parse_turn,
    take_turn,
    unread,
)
from rlflow.rollout.conversation_loop import ConversationSteps, EnvironmentCall
from rlflow.values.rollout import Ending


def play_game(
    game: GameSession,
    bridge: Bridge,
    prompt: Sequence[Message],
    row: dict[str, Any],
    seed_of: Callable[[str, int], int],
    rules: Mapping[str, Rules],
) -> ConversationSteps[dict[str, Conversation]]:
    """A game, from the messages of its prompt to its end: the conversation of each seat, by name.

    One seat speaks at a time. What the others read meanwhile stands in their conversations before their next turn. A
    seat that never had one has a turn without tokens, for its reward.

    Args:
        game: With its environment.
        bridge: Writes the turns of all seats.
        prompt: Prompt of the dataset's row.
        row: All of its columns.
        seed_of: The seed of each turn, given the seat and its number among those of this seat.
        rules: How the conversation of each seat goes, and who speaks in it.

    Raises:
        UserError: As of `rlflow.rollout.conversation.converse`; or a seat speaks or is rewarded that is none.
    """
    table = _Table(game, bridge, prompt, rules)
    first = yield EnvironmentCall(partial(_begin, game, prompt, row))
    if isinstance(first, HostError):
        return table.failed(first)
    table.prompt, move = first["prompt"], Move(**first["move"])
    while not move.done:
        speaking = table.reads(move)
        if speaking.ended is not None:
            break
        yield from take_turn(speaking, partial(seed_of, move.seat), rules[move.seat])
        moved = yield EnvironmentCall(partial(_move, game, parse_turn(speaking).text, move.seat, speaking.turns - 1))
        if isinstance(moved, HostError):
            return table.failed(moved)
        move = Move(**moved)
        table.reward(move.rewards)
    rewards = yield EnvironmentCall(partial(_rewards, game))
    if isinstance(rewards, HostError):
        return table.failed(rewards)
    table.reward(rewards)
    return table.over()


class _Table:
    """The conversations of a game.

    Attributes:
        prompt: Messages with which each seat begins.
    """

    def __init__(
        self, game: GameSession, bridge: Bridge, prompt: Sequence[Message], rules: Mapping[str, Rules]
    ) -> None:
        self.prompt = prompt
        self._game = game
        self._bridge = bridge
        self._rules = rules
        self._seats: dict[str, Conversation] = {}
        self._rewards = dict.fromkeys(rules, 0.0)  # not yet given to a turn

    def reads(self, move: Move) -> Conversation:
        """That of the seat that speaks next, with what it reads before; it is over where there is no room for it."""
        if move.seat in self._seats:
            conversation = self._seats[move.seat]
            add_answer(conversation, move.messages, self._rules[move.seat])
            return conversation
        if self._too_late(move):
            conversation = self._seated(move.seat, ())
            conversation.end(Ending.TOKENS, "what it reads before its first turn is longer than prompts may be")
            conversation.messages += unread(move.messages)
            return conversation
        return self._seated(move.seat, move.messages)

    def _too_late(self, move: Move) -> bool:
        """Whether what others sampled before this seat's first turn made its prompt too long."""
        if not any(each.turns for each in self._seats.values()):
            return False
        with self._game.of_row():
            prompt = self._bridge.begin([*self.prompt, *move.messages])
        return len(prompt) > self._rules[move.seat].longest_prompt

    def reward(self, rewards: Mapping[str, float]) -> None:
        """Add these to the last turns of their seats."""
        for seat, reward in rewards.items():
            self._rewards[seat] += reward
        for seat, conversation in self._seats.items():
            if conversation.turns:
                conversation.rewards[-1] += self._rewards[seat]
                self._rewards[seat] = 0.0

    def over(self) -> dict[str, Conversation]:
        """All, each with its end: that of the seat that could not go on, if one could not."""
        cut = next((each for each in self._seats.values() if each.ended is not None), None)
        for seat in self._rules:
            conversation = self._seats.get(seat) or self._seated(seat, ())
            if not conversation.turns:
                conversation.segments, conversation.rewards = [0], [self._rewards[seat]]
            if conversation.ended is None and cut is None:
                conversation.end(Ending.DONE, "the environment ended it")
            elif conversation.ended is None and cut is not None and cut.ended is not None:
                conversation.end(cut.ended, f"another seat ended it: {cut.why}")
        return {seat: self._seats[seat] for seat in self._rules}

    def failed(self, error: HostError) -> dict[str, Conversation]:
        """All, each ended by a failure of the environment."""
        for seat, rules in self._rules.items():
            fail(self._seats.get(seat) or self._seated(seat, ()), error, rules)
        return {seat: self._seats[seat] for seat in self._rules}

    def _seated(self, seat: str, messages: Sequence[Message]) -> Conversation:
        conversation = new_conversation(self._game, self._bridge, [*self.prompt, *messages], self._rules[seat])
        conversation.seat = list(self._rules).index(seat)
        self._seats[seat] = conversation
        return conversation


def _begin(game: GameSession, prompt: Sequence[Message], row: dict[str, Any]) -> dict[str, Any]:
    messages, move = game.begin(prompt, row)
    return {"prompt": messages, "move": asdict(move)}


def _move(game: GameSession, text: str, seat: str, turn: int) -> dict[str, Any]:
    return asdict(game.move(text, seat, turn))


def _rewards(game: GameSession) -> dict[str, float]:
    return dict(game.rewards())
