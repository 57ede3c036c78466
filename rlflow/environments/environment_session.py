"""`EnvironmentSession`: one conversation's environment, made from a row of the dataset, whoever speaks in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from rlflow.environments.definition import Definition
from rlflow.environments.host import Host, HostError
from rlflow.environments.messages import Message, checked, message, text_of
from rlflow.environments.watch import watch
from rlflow.errors import UserError

Given = ParamSpec("Given")
Result = TypeVar("Result")
Of = TypeVar("Of", bound="EnvironmentSession")


def naming_row(method: Callable[Concatenate[Of, Given], Result]) -> Callable[Concatenate[Of, Given], Result]:
    """Name the row of the dataset in what a method of a session refuses, and warn where it does not return."""

    @wraps(method)
    def named(self: Of, /, *given: Given.args, **by_name: Given.kwargs) -> Result:
        with self.of_row():
            if self._host.limited:
                return method(self, *given, **by_name)
            with watch.watched(lambda: f"{self}, `{method.__name__}`; the row is {self.row}"):
                return method(self, *given, **by_name)

    return named


class EnvironmentSession:
    """The environment of one conversation or game; `Session` and `GameSession` say how its turns are answered.

    Args:
        definition: Of the environment.
        host: Where its code runs; it keeps this environment alone until `close`.
        row: Of the dataset, which errors name, on ranks too that make no calls; None where the beginning is given it
            first.
        seed: Of what its environment draws from the process-wide `random` and NumPy.
        place: The row's number in the dataset, which errors name; None where it has none.
    """

    def __init__(
        self,
        definition: Definition,
        host: Host,
        row: Mapping[str, Any] | None = None,
        seed: int = 0,
        place: int | None = None,
    ) -> None:
        self._definition = definition
        self._host = host
        self._seed = seed
        self._row = row or {}
        self._place = place

    @property
    def seats(self) -> tuple[str, ...]:
        """Of its environment; empty where there is one, without a name."""
        return self._definition.seats

    def __str__(self) -> str:
        return f"`{self._definition.path}`" if self._definition.path else "of `tools`"

    @contextmanager
    def of_row(self, turn: int | None = None) -> Iterator[None]:
        """Name the row of the dataset in what is refused; and the environment, where it is an answer to a turn."""
        answering = "" if turn is None else f"answering turn {turn}, the environment is {self}, and "
        try:
            yield
        except UserError as error:
            raise UserError(f"{error} ({answering}the row is {self.row})") from error

    @property
    def row(self) -> str:
        """The row of the dataset that it began with: its number, and so many characters as a line has room for."""
        shown = repr(dict(self._row))
        shown = shown if len(shown) <= 100 else f"{shown[:100]}..."
        return shown if self._place is None else f"{self._place}, {shown}"

    @naming_row
    def group_rewards(self, conversations: Sequence[Mapping[str, Any]]) -> list[float]:
        """What each conversation from one row gets beside the others, from `get_group_rewards`, when all are over.

        The environment is made anew, for those of the conversations may be gone.

        Args:
            conversations: Each with its `messages`, the `rewards` of its turns, its `row` and its `seat`.

        Raises:
            HostError: The environment failed, or gave something other than a finite number for each.
        """
        made, where = self._definition, f"`{self._definition.path}.get_group_rewards`"
        self._row = conversations[0]["row"]
        self._begin()
        self._host.make(made.path, **made.arguments)
        given = self._host.call("get_group_rewards", conversations=conversations)
        if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != len(conversations):
            raise HostError(
                f"{where} gave {given!r:.60} for {len(conversations)} conversations; give a number for each"
            )
        return [self._number(value, where) for value in given]

    def _made(self, prompt: Sequence[Message], row: Mapping[str, Any]) -> list[Message]:
        """Make the environment for a row: the messages of the prompt, with what `reset` says."""
        made, self._row = self._definition, row
        messages = [{**each, "content": text_of(each["content"], "the prompt")} for each in prompt]
        self._begin()
        if made.path:
            self._host.make(made.path, **made.arguments)
        said = self._host.call("reset", **made.given(row)) if made.resets else None
        if isinstance(said, str):
            _append(messages, said)
        else:
            messages += checked(said, f"`{made.path}.reset`")
        return messages

    def _begin(self) -> None:
        made = self._definition
        paths = [path for path in (made.path, *(tool.path for tool in made.tools.values())) if path]
        self._host.begin(self._seed, paths)

    def _number(self, value: Any, where: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise HostError(f"{where} gave the reward {value!r:.60}; give a finite number")
        return float(value)

    def _messages(self, given: Any, where: str) -> list[Message]:
        """What answers a turn, as messages."""
        try:
            return checked(given, where)
        except UserError as error:
            raise HostError(str(error)) from error


def as_mapping(given: Any, names: Sequence[str]) -> Mapping[str, Any] | None:
    """What a step gave, an object with some of these attributes among it, by name; None where it is neither."""
    if isinstance(given, Mapping):
        return given
    found = {name: getattr(given, name) for name in names if hasattr(given, name)}
    return found or None


def written(each: Message) -> Message:
    """A message that a tokenizer takes: half characters, which JSON may hold, are replaced."""
    whole = {key: x.encode("utf-8", "replace").decode("utf-8") for key, x in each.items() if isinstance(x, str)}
    return {**each, **whole}


def _append(messages: list[Message], said: str) -> None:
    """To the user's last message; as one of its own where there is none."""
    last = next((place for place in reversed(range(len(messages))) if messages[place]["role"] == "user"), None)
    if last is None:
        messages.append(message("user", said))
    else:
        messages[last] = {**messages[last], "content": f"{messages[last]['content']}{said}"}
