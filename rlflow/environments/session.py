"""`Session`: an environment that one policy speaks with, from the row of the dataset to the last reward."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rlflow.environments.bridge import ParsedTurn
from rlflow.environments.definition import Definition
from rlflow.environments.environment_session import EnvironmentSession, as_mapping, naming_row, written
from rlflow.environments.host import Host, HostDied, HostError
from rlflow.environments.messages import Message, checked, message
from rlflow.environments.tool_calls import ToolCall
from rlflow.errors import UserError, one_line


@dataclass(frozen=True)
class Reply:
    """What an environment says to a turn of the policy.

    Attributes:
        messages: What the policy reads next.
        reward: Of this turn.
        done: Whether the conversation is over.
        calls: How many tools were called.
        failed: How many of these calls gave no value: they could not be read, or the tool raised.
        over: Where it is, why: the environment said so, the policy called no tool, or went on calling after its last.
    """

    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False
    calls: int = 0
    failed: int = 0
    over: Literal["environment", "answer", "limit"] = "environment"


class Session(EnvironmentSession):
    """Answers the turns of one policy.

    Args:
        definition: Of the environment.
        host: Where its code runs; it keeps this environment alone until `close`.
        row: Of the dataset, which errors name, on ranks too that make no calls; None where `begin` is given it first.
        max_tool_calls: Calls after these are refused, and a turn of them alone ends it; None for any number.
        seed: Of what its environment draws from the process-wide `random` and NumPy.
        place: The row's number in the dataset, which errors name; None where it has none.
        calls: Of tools, that the policy made before, where a conversation is continued.
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
        super().__init__(definition, host, row, seed, place)
        self._limit = max_tool_calls
        self._calls_made = calls if max_tool_calls is None else min(calls, max_tool_calls)

    @property
    def keeps_state(self) -> bool:
        """Whether `state` says all that it takes to continue."""
        return self._definition.keeps_state

    @naming_row
    def state(self) -> dict[str, Any]:
        """What it takes to continue by `restore`, as JSON: what `state_dict` gives, and where random numbers are.

        Raises:
            HostError: The environment failed.
            UserError: It gave what JSON has not.
        """
        made = self._definition
        kept = self._host.call("state_dict") if made.path else None
        try:
            return {"environment": json.loads(json.dumps(kept)), "draws": self._host.draws()}
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(
                f"`{made.path}.state_dict` gave what JSON has not ({one_line(error)}); give texts, numbers, lists, and"
                " dictionaries of these"
            ) from error

    @naming_row
    def restore(self, state: Mapping[str, Any]) -> None:
        """Make the environment as it was when `state` gave this; `load_state_dict` takes the place of `reset`.

        Raises:
            HostError: The environment failed.
        """
        made = self._definition
        self._begin()
        if made.path:
            self._host.make(made.path, **made.arguments)
            self._host.call("load_state_dict", state=state["environment"])
        if state["draws"] is not None:
            self._host.set_draws(state["draws"])

    @naming_row
    def begin(self, prompt: Sequence[Message], row: Mapping[str, Any]) -> list[Message]:
        """The messages of the first turn.

        Args:
            prompt: Those of the dataset's row.
            row: All of its columns.

        Raises:
            HostError: The environment failed.
            UserError: It does not take the row, or gave no messages.
        """
        messages, made = self._made(prompt, row), self._definition
        if made.answers_messages:
            messages += checked(self._host.call("initial_observation"), f"`{made.path}.initial_observation`")
        return [written(each) for each in messages]

    @naming_row
    def answer(self, parsed: ParsedTurn, turn: int) -> Reply:
        """What the environment says to a turn of the policy.

        Raises:
            HostError: The environment failed, or gave what is no message or no finite reward.
        """
        reply = self._step(parsed, turn) if self._definition.answers_messages else self._call_tools(parsed.calls)
        return replace(reply, messages=[written(each) for each in reply.messages])

    @naming_row
    def reward(self) -> float | None:
        """Of the whole conversation, from `get_reward`, or else from what the environment keeps as its `reward`.

        None where it has neither, and where it answers messages.

        Raises:
            HostError: The environment failed, or gave no finite number.
        """
        made = self._definition
        if not made.rewards:
            kept = (
                None if made.answers_messages or not made.path or "reward" in made.tools else self._host.read("reward")
            )
            return None if kept is None else self._number(kept, f"`{made.path}.reward`")
        return self._number(self._host.call("get_reward"), f"`{self._definition.path}.get_reward`")

    def _step(self, parsed: ParsedTurn, turn: int) -> Reply:
        result = self._host.call("step", message=message("assistant", parsed.text))
        where = f"`{self._definition.path}.step` at turn {turn}"
        found = as_mapping(result, ("reward", "episode_done", "next_messages"))
        if found is None:
            raise HostError(f"{where} gave {result!r:.60}; give `reward`, `episode_done` and `next_messages`")
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
        """What a tool says, and whether it gave a value. What went wrong is told to the policy, which may try again."""
        if call.problem:
            return call.problem, False
        tool = self._definition.tools.get(call.name)
        if tool is None:
            return f"there is no tool `{call.name}`; there are {', '.join(self._definition.tools)}", False
        if problem := tool.missing_or_unknown(call.arguments):
            return problem, False
        try:
            said = self._host.text(call.name if tool.method else tool.path, tool.method, call.arguments)
        except HostDied:
            raise  # the environment is gone with it
        except HostError as error:
            return str(error), False
        return said, True


def _tool_message(call: ToolCall, content: str) -> Message:
    """What a tool answers a call."""
    named = {"tool_call_id": call.id} if call.id else {}
    return message("tool", content, name=call.name, **named)
