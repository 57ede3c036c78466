"""`Session`: the environment of one conversation or game, made from a row of the dataset."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from rlflow.environments.bridge import Message, ParsedTurn, checked, message
from rlflow.environments.environment import Definition
from rlflow.environments.host import Host, HostError
from rlflow.environments.tool_calls import ToolCall
from rlflow.errors import UserError, one_line
from rlflow.worker import WorkerDied, WorkerError

Given = ParamSpec("Given")
Result = TypeVar("Result")


def naming_row(
    method: Callable[Concatenate[Session, Given], Result],
) -> Callable[Concatenate[Session, Given], Result]:
    """Add the row of the dataset to the errors of a session's method."""

    @wraps(method)
    def named(self: Session, /, *given: Given.args, **by_name: Given.kwargs) -> Result:
        with self.of_row():
            return method(self, *given, **by_name)

    return named


class Session:
    """The environment of one conversation, or of one game with all its seats.

    A conversation calls `begin`, `answer` and `reward`; a game, whose environment has `seats`, calls `begin`,
    `first_move`, `move` and `rewards`. The environment of a game names the seat that speaks next as `next_seat`, and
    what it reads as `next_messages`. Its `step` gives `reward`, of the seat that spoke, or `rewards` by seat;
    `get_reward` gives them by seat.

    Args:
        definition: Definition of the environment.
        host: Host in which its code runs; it serves this environment alone until `close`.
        row: Row of the dataset, which errors name, on ranks too that make no calls; None where `begin` is given it
            first.
        max_tool_calls: Calls after these are refused, and a turn of them alone ends it; None for any number.
        seed: Seed of the environment's draws from the process-wide `random` and NumPy.
        place: The row's number in the dataset, which errors name; None where it has none.
        calls: Calls of tools, that the policy made before, where a conversation is continued.
    """

    def __init__(
        self,
        definition: Definition,
        host: Host,
        row: Mapping[str, Any] | None = None,
        max_tool_calls: int | None = None,
        seed: int = 0,
        place: int | None = None,
        calls: int = 0,
    ) -> None:
        self.definition = definition
        self._host = host
        self._row = row or {}
        self._limit = max_tool_calls
        self._seed = seed
        self._place = place
        self._calls_made = calls if max_tool_calls is None else min(calls, max_tool_calls)

    def __str__(self) -> str:
        return f"`{self.definition.path}`" if self.definition.path else "of `tools`"

    @contextmanager
    def of_row(self, turn: int | None = None) -> Iterator[None]:
        """A context that adds the row of the dataset to errors; and the environment, if the error is in its answer."""
        answering = "" if turn is None else f"answering turn {turn}, the environment is {self}, and "
        try:
            yield
        except UserError as error:
            raise UserError(f"{error} ({answering}the row is {self.row})") from error

    @property
    def row(self) -> str:
        """The row of the dataset that it began with: its number, and as many characters as a line has room for."""
        shown = repr(dict(self._row))
        shown = shown if len(shown) <= 100 else f"{shown[:100]}..."
        return shown if self._place is None else f"{self._place}, {shown}"

    @naming_row
    def begin(self, prompt: Sequence[Message], row: Mapping[str, Any]) -> list[Message]:
        """The messages of the first turn; in a game, those with which each seat begins.

        Args:
            prompt: Messages of the dataset's row, as `messages_of_prompt` gives them.
            row: The dataset's row, with all columns.

        Raises:
            WorkerError: The environment failed, or gave something other than a message.
            UserError: It does not take the row.
        """
        made, self._row = self.definition, row
        messages = list(prompt)
        self._make()
        said = self._host.call("reset", **made.given(row)) if made.resets else None
        if isinstance(said, str):
            _append(messages, said)
        else:
            messages += self._messages(said, f"`{made.path}.reset`")
        if made.answers_messages and not made.seats:
            messages += self._messages(self._host.call("initial_observation"), f"`{made.path}.initial_observation`")
        return [written(each) for each in messages]

    @naming_row
    def answer(self, parsed: ParsedTurn, turn: int) -> Reply:
        """The environment's answer to a turn of the policy; turns are numbered from 1.

        Raises:
            WorkerError: The environment failed, or gave something other than a message and a finite reward.
        """
        reply = self._step(parsed, turn) if self.definition.answers_messages else self._call_tools(parsed.calls)
        return replace(reply, messages=[written(each) for each in reply.messages])

    @naming_row
    def reward(self) -> float | None:
        """The reward of the whole conversation, from `get_reward`, or else from its attribute `reward`.

        None where it has neither, and where it answers messages.

        Raises:
            WorkerError: The environment failed, or gave no finite number.
        """
        made = self.definition
        if made.rewards:
            return self._number(self._host.call("get_reward"), f"`{made.path}.get_reward`")
        if made.answers_messages or not made.path or "reward" in made.tools:
            return None
        kept = self._host.read("reward")
        return None if kept is None else self._number(kept, f"`{made.path}.reward`")

    @naming_row
    def first_move(self) -> Move:
        """The first move of a game that has begun: who speaks first.

        Raises:
            WorkerError: The environment failed, or gave something other than a message and a seat.
        """
        where = f"`{self.definition.path}.initial_observation`"
        return self._moved(self._host.call("initial_observation"), "", where)

    @naming_row
    def move(self, text: str, seat: str, turn: int) -> Move:
        """The game's answer to a seat's turn of this number, from 1.

        Raises:
            WorkerError: The environment failed, or gave something other than a message, a finite reward and a seat.
        """
        result = self._host.call("step", message=message("assistant", text))
        return self._moved(result, seat, f"`{self.definition.path}.step` at turn {turn} of {seat}")

    @naming_row
    def rewards(self) -> dict[str, float]:
        """The rewards of the whole game by seat, from `get_reward`; none where the environment has no such method."""
        if not self.definition.rewards:
            return {}
        return self._by_seat(self._host.call("get_reward"), f"`{self.definition.path}.get_reward`")

    @naming_row
    def group_rewards(self, conversations: Sequence[Mapping[str, Any]]) -> list[float]:
        """The reward of each conversation of a group, from one row, from `get_group_rewards`, when all are over.

        The environment is made again, for those of the conversations may be gone.

        Args:
            conversations: Each with its `messages`, the `rewards` of its turns, its `row` and its `seat`.

        Raises:
            WorkerError: The environment failed, or gave something other than a finite number for each.
        """
        where = f"`{self.definition.path}.get_group_rewards`"
        self._row = conversations[0]["row"]
        self._make()
        given = self._host.call("get_group_rewards", conversations=conversations)
        if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != len(conversations):
            raise HostError(
                f"{where} gave {given!r:.60} for {len(conversations)} conversations; give a number for each"
            )
        return [self._number(value, where) for value in given]

    @naming_row
    def state(self) -> dict[str, Any]:
        """The state from which `restore` continues, as JSON: the result of `state_dict`, and the random states.

        Raises:
            WorkerError: The environment failed.
            UserError: It gave what JSON has not.
        """
        made = self.definition
        kept = self._host.call("state_dict") if made.path else None
        try:
            return {"environment": json.loads(json.dumps(kept)), "draws": self._host.draws()}
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(
                f"`{made.path}.state_dict` returned a value that JSON cannot hold ({one_line(error)}); give texts,"
                " numbers, lists, and dictionaries of these"
            ) from error

    @naming_row
    def restore(self, state: Mapping[str, Any]) -> None:
        """Make the environment as it was when `state` returned this; `load_state_dict` takes the place of `reset`.

        Raises:
            WorkerError: The environment failed.
        """
        self._make()
        if self.definition.path:
            self._host.call("load_state_dict", state=state["environment"])
        if state["draws"] is not None:
            self._host.set_draws(state["draws"])

    def _make(self) -> None:
        """Import the environment's code, seed its random numbers, and make the object."""
        made = self.definition
        functions = [tool.path for tool in made.tools.values() if not tool.method]
        self._host.begin(self._seed, [made.path, *functions] if made.path else functions)
        if made.path:
            self._host.make(made.path, **made.arguments)

    def _number(self, value: Any, where: str) -> float:
        if not is_number(value):
            raise HostError(f"{where} gave the reward {value!r:.60}; give a finite number")
        return float(value)

    def _messages(self, given: Any, where: str) -> list[Message]:
        """The messages in an answer of the environment."""
        try:
            return checked(given, where)
        except UserError as error:
            raise HostError(str(error)) from error

    def _step(self, parsed: ParsedTurn, turn: int) -> Reply:
        result = self._host.call("step", message=message("assistant", parsed.text))
        where = f"`{self.definition.path}.step` at turn {turn}"
        names = ("reward", "episode_done", "next_messages")
        found = _fields(result, names, where, "`reward`, `episode_done` and `next_messages`")
        reward = self._number(found.get("reward", 0.0), where)
        return Reply(self._messages(found.get("next_messages"), where), reward, bool(found.get("episode_done", False)))

    def _call_tools(self, calls: Sequence[ToolCall]) -> Reply:
        if not calls:
            return Reply(done=True, over="answer")  # it has answered
        limit, before = self._limit, self._calls_made
        left = len(calls) if limit is None else limit - before
        refused = f"this call is refused: no more than {limit} may be made; answer without them"
        results = [self._result(call) for call in calls[:left]] + [(refused, False)] * len(calls[left:])
        self._calls_made += len(calls[:left])
        messages = [_tool_message(call, content) for call, (content, _) in zip(calls, results, strict=True)]
        failed = sum(not ok for _, ok in results)
        return Reply(messages, done=left == 0, calls=len(calls), failed=failed, over="limit")

    def _result(self, call: ToolCall) -> tuple[str, bool]:
        """The answer of a tool, and whether it is a value. The policy reads errors, and may try again."""
        if call.problem:
            return call.problem, False
        tool = self.definition.tools.get(call.name)
        if tool is None:
            return f"there is no tool `{call.name}`; there are {', '.join(self.definition.tools)}", False
        if problem := tool.missing_or_unknown(call.arguments):
            return problem, False
        try:
            said = self._host.text(call.name if tool.method else tool.path, tool.method, call.arguments)
        except WorkerDied:
            raise  # the environment is gone with it
        except WorkerError as error:
            return str(error), False
        return said, True

    def _moved(self, result: Any, spoke: str, where: str) -> Move:
        names = ("next_seat", "next_messages", "reward", "rewards", "episode_done")
        found = _fields(result, names, where, "`next_seat` and `next_messages`, or `episode_done`")
        rewards = self._by_seat(found.get("rewards") or {}, where)
        if spoke and "reward" in found:
            rewards[spoke] = rewards.get(spoke, 0.0) + self._number(found["reward"], where)
        if found.get("episode_done", False):
            return Move(rewards=rewards, done=True)
        seat = found.get("next_seat")
        if seat not in self.definition.seats:
            raise HostError(
                f"{where} gave the seat {seat!r:.60} as `next_seat`, and `seats` are"
                f" {', '.join(self.definition.seats)}; name one of them"
            )
        return Move(seat, [written(each) for each in self._messages(found.get("next_messages"), where)], rewards)

    def _by_seat(self, given: Any, where: str) -> dict[str, float]:
        if not isinstance(given, Mapping) or not set(given) <= set(self.definition.seats):
            raise HostError(
                f"{where} gave the rewards {given!r:.60}; give a number for each of {', '.join(self.definition.seats)}"
            )
        return {seat: self._number(value, where) for seat, value in given.items()}


@dataclass(frozen=True)
class Reply:
    """Answer of an environment to a turn of the policy.

    Attributes:
        messages: Messages that the policy reads next.
        reward: Reward of this turn.
        done: Whether the conversation is over.
        calls: Number of tools that were called.
        failed: Number of these calls that gave no value: they could not be read, or the tool raised.
        over: Reason why it is over, if it is: the environment ended it, the policy called no tool, or it called as many
            tools as are allowed.
    """

    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False
    calls: int = 0
    failed: int = 0
    over: Literal["environment", "answer", "limit"] = "environment"


@dataclass(frozen=True)
class Move:
    """State of a game after a move.

    Attributes:
        seat: Seat that speaks next; empty where the game is over.
        messages: Messages that this seat reads: those since its last turn that it may know.
        rewards: Rewards by seat.
        done: Whether the game is over.
    """

    seat: str = ""
    messages: list[Message] = field(default_factory=list)
    rewards: Mapping[str, float] = field(default_factory=dict)
    done: bool = False


def _tool_message(call: ToolCall, content: str) -> Message:
    """A tool's answer to a call, as a message."""
    named = {"tool_call_id": call.id} if call.id else {}
    return message("tool", content, name=call.name, **named)


def _fields(given: Any, names: Sequence[str], where: str, expected: str) -> Mapping[str, Any]:
    """The parts of a step's result by name: from a mapping, or from the attributes of an object.

    Raises:
        HostError: It is neither.
    """
    if isinstance(given, Mapping):
        return given
    found = {name: getattr(given, name) for name in names if hasattr(given, name)}
    if not found:
        raise HostError(f"{where} gave {given!r:.60}; give {expected}")
    return found


def written(each: Message) -> Message:
    """A message that a tokenizer takes: half characters, which JSON may hold, are replaced."""
    whole = {key: x.encode("utf-8", "replace").decode("utf-8") for key, x in each.items() if isinstance(x, str)}
    return {**each, **whole}


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, as rewards are."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer that is larger than all floats
        return False


def _append(messages: list[Message], said: str) -> None:
    """Append a text to the user's last message, or as a message of its own where there is none."""
    last = next((place for place in reversed(range(len(messages))) if messages[place]["role"] == "user"), None)
    if last is None:
        messages.append(message("user", said))
        return
    content = messages[last]["content"]
    more = [{"type": "text", "text": said}] if isinstance(content, list) else said
    messages[last] = {**messages[last], "content": content + more}
