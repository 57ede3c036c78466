"""`Conversation`, the record of one in progress: tokens of the policy and of its environment, and who wrote which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from rlflow.environments.bridge import Bridge, Message
from rlflow.environments.session import EnvironmentSession
from rlflow.rollout.engine import Completion
from rlflow.values.rollout import Ending


@dataclass
class Conversation:
    """One conversation, as far as it got.

    Attributes:
        session: What answers.
        bridge: Writes its turns.
        prompt: Token ids of the first turn's prompt.
        messages: All that was said, the prompt's among it.
        tokens: Ids after the prompt, of the policy and of the environment.
        logprobs: Of each token; 0 where the environment wrote it.
        written: Of each token, whether the policy wrote it.
        segments: How many tokens each turn of the policy and each answer to it has, by turns.
        rewards: Of each turn.
        ended: Why it is over; None as long as it is not.
        why: The same in words, for people.
        cut: Whether the last turn of the policy was cut at its longest length.
        seat: Whose view it is, as a number among the environment's seats.
        calls: Of tools.
        failed: How many of these gave no value.
        turn_open: Whether the last turn was cut off and is to be continued.
        sampled: Tokens that the policy wrote in this call of `converse`.
        versions: Of the policy, of each token that was there before this call.
        draw: How often prompts were drawn before it began.
        state: Of its environment where it was cut off, see `Session.state`; None where that stays as it is.
        was_over: Whether it was over before this call.
        begun_anew: Whether it was cut off and its environment is gone, so that it began once more.
    """

    session: EnvironmentSession
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
    begun_anew: bool = False

    @property
    def turns(self) -> int:
        """Turns of the policy so far."""
        return len(self.rewards)

    @property
    def last_turn(self) -> list[int]:
        """Tokens of the policy's last turn."""
        starts = [0, *accumulate(self.segments)]
        last = (len(self.segments) - 1) // 2 * 2  # segments are turns and answers, one after another
        return self.tokens[starts[last] : starts[last + 1]] if self.segments else []

    def add_turn(self, completion: Completion, ends: bool = True) -> None:
        """Add a turn of the policy, or what follows of one that is open; it is open as long as it does not end."""
        self.tokens += completion.token_ids
        self.logprobs += completion.logprobs
        self.written += [True] * len(completion.token_ids)
        if self.turn_open:
            self.segments[-1] += len(completion.token_ids)
        else:
            self.segments.append(len(completion.token_ids))
            self.rewards.append(0.0)
        self.sampled += len(completion.token_ids)
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
        """Say that it is over."""
        self.ended, self.why = ended, why
