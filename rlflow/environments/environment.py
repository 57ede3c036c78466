"""`Environment`, what a user says of what answers a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, get_args

from rlflow.environments.coroutines import Coroutines
from rlflow.environments.definition import Definition, defined
from rlflow.environments.host import Host, InProcess, InWorker
from rlflow.errors import UserError, did_you_mean
from rlflow.worker import Limits

OnFailure = Literal["raise", "zero", "mask"]


class Environment:
    """What answers a policy, turn by turn.

    An environment is a class of one of two forms. In TRL's, its public methods with docstrings and types are tools that
    the policy may call; it is over when a turn calls none. In Tinker's `MessageEnv`, `initial_observation` and `step`
    answer the policy's messages; `step` says when it is over. Both may have `reset(**row)`, which gets the columns of
    the dataset's row that it names, and what TRL's returns is added to the prompt. Both may have `get_reward`, asked at
    the end; `step` gives rewards of turns, and in TRL's form an attribute `reward` will do. Methods may be coroutines.
    There is one instance for each conversation.

    With `trainer.partial_rollout` a conversation may wait for a later step. Where the class has `state_dict()`, which
    gives JSON, and `load_state_dict(state)`, called in place of `reset` on one made anew, it waits in checkpoints too.

    Args:
        environment: Dotted path of the class, or the class; None where there are `tools` alone. Of several, by name:
            each row is answered by the one that its column `by` names.
        tools: Functions that the policy may call beside methods, or their dotted paths.
        arguments: That the class is made with; of several, by the same names.
        by: The column of the dataset that chooses of several.
        max_turns: Turns of the policy, at most.
        max_tool_calls: Calls after these are refused. The policy reads what the last one gave and may answer; a turn
            that calls again ends the conversation. None for any number.
        max_turn_length: Tokens of a turn of the policy, at most; None for as many as the response has left.
        seconds: What a call of the environment may take. It then runs in a process of its own that can be killed; None
            for in the rank's own process, with no limit.
        workers: How many such processes a rank has, and so how many of its conversations go on at once.
        memory_mb: What each of them may take of memory; needs `seconds`.
        on_failure: What becomes of a conversation whose environment raises, takes too long or dies: `raise` ends the
            run, `zero` gives it 0 in place of what the environment gave, `mask` leaves it out of the loss too. A tool
            that raises is no failure: the policy reads why.
        lockstep: With `seconds`, all conversations of a rank that are open take their turns together, so that engines
            compute the same batches in every run, whoever answers first. Without `seconds` they always do.
        at_once: Calls in progress together on a rank where methods or tools are coroutines, which leave each other room
            when they await. Without `seconds`; code that has no coroutine is called once at a time.

    Raises:
        UserError: There is no such class, or it has no form that is known; or a setting cannot be.
    """

    def __init__(
        self,
        environment: str | type | Mapping[str, str | type] | None = None,
        tools: Sequence[str | Callable[..., Any]] = (),
        arguments: Mapping[str, Any] | None = None,
        by: str = "environment",
        max_turns: int = 8,
        max_tool_calls: int | None = None,
        max_turn_length: int | None = None,
        seconds: float | None = None,
        workers: int = 8,
        memory_mb: int = 4096,
        on_failure: OnFailure = "raise",
        lockstep: bool = False,
        at_once: int = 64,
    ) -> None:
        if not environment and not tools:
            raise UserError(
                "neither `environment` nor `tools` is given, so nothing answers the policy; give one of them"
            )
        counts = {"max_turns": max_turns, "workers": workers, "max_turn_length": max_turn_length, "at_once": at_once}
        for name, count in {**counts, "max_tool_calls": max_tool_calls}.items():
            if count is not None and count < 1:
                raise UserError(f"`{name}` is {count}; give 1 or more")
        if on_failure not in get_args(OnFailure):
            raise UserError(f"`on_failure` is {on_failure!r}; give one of {', '.join(get_args(OnFailure))}")
        self.max_turns = max_turns
        self.max_tool_calls = max_tool_calls
        self.max_turn_length = max_turn_length
        self.on_failure = on_failure
        self._at_once = at_once
        self.workers = None if seconds is None else workers
        self.lockstep = lockstep or seconds is None
        self._limits = None if seconds is None else Limits(seconds=seconds, memory_mb=memory_mb)
        self.by = by if isinstance(environment, Mapping) else None
        self._classes = dict(environment) if isinstance(environment, Mapping) else {"": environment}
        self._arguments = _arguments(self._classes, arguments or {}) if self.by else {"": arguments or {}}
        self._tools = tuple(tools)

    @cached_property
    def definitions(self) -> dict[str, Definition]:
        """What each class has, read once: by the name that a row calls it by, or "" where there is one for all."""
        return {name: defined(cls, self._tools, self._arguments[name]) for name, cls in self._classes.items()}

    def definition_of(self, row: Mapping[str, Any]) -> Definition:
        """Of what answers this row of the dataset.

        Raises:
            UserError: There are several, and the row names none of them.
        """
        if self.by is None:
            return self.definitions[""]
        if self.by not in row:
            raise UserError(
                f"`by` is {self.by!r}, the column that says which environment answers, and a row has none (it has"
                f" {', '.join(row)}).{did_you_mean(self.by, row) or ' Add the column'}"
            )
        name = row[self.by]
        if not isinstance(name, str) or name not in self._classes:
            raise UserError(
                f"a row has {name!r:.60} in `{self.by}`, and `environment` has {', '.join(self._classes)}."
                f"{did_you_mean(str(name), self._classes) or ' Name one of them'}"
            )
        return self.definitions[name]

    def seats_of(self, policy: str, players: Mapping[str, str]) -> tuple[str, ...]:
        """The seats for which a policy speaks, in their order; one without a name where there are none.

        Args:
            policy: Speaks for all seats that others do not.
            players: Who speaks for a seat, by its name.

        Raises:
            UserError: There is no such seat, or none is left; or several environments have other seats.
        """
        first, *more = self.definitions.values()
        for other in more:
            if other.seats != first.seats:
                raise UserError(
                    f"`environment` has {first.path} with the seats {_named(first)} and {other.path} with"
                    f" {_named(other)}, and a row of the dataset has as many conversations in each; give them the same"
                )
        for seat in players:
            if seat not in first.seats:
                raise UserError(
                    f"`players` has `{seat}`, and {self} has the seats {_named(first)}."
                    f"{did_you_mean(seat, first.seats) or ' Name one of them'}"
                )
        own = tuple(seat for seat in first.seats if players.get(seat, policy) == policy)
        if first.seats and not own:
            raise UserError(
                f"`players` has all seats of {self}, {_named(first)}, and the model that converses speaks for none;"
                " leave one out"
            )
        return own or ("",)

    @cached_property
    def overlaps(self) -> bool:
        """Whether calls in the rank's own process are made side by side: something of it is a coroutine."""
        return self.workers is None and any(each.awaits for each in self.definitions.values())

    @property
    def calls_at_once(self) -> int:
        """How many calls a rank makes together."""
        return self.workers or (self._at_once if self.overlaps else 1)

    def __str__(self) -> str:
        return ", ".join(each.path or "tools" for each in self.definitions.values())

    def host(self, coroutines: Coroutines | None = None) -> Host:
        """Where the code of one conversation's environment runs; in the rank's own process with these coroutines."""
        return InProcess(coroutines, self.overlaps) if self._limits is None else InWorker(self._limits)


def _named(definition: Definition) -> str:
    return ", ".join(definition.seats) or "none"


def _arguments(classes: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Those of each of several classes."""
    for name, given in arguments.items():
        if name not in classes:
            raise UserError(
                f"`arguments` has `{name}`, and `environment` has {', '.join(classes)}; of several environments,"
                f" give the arguments of each by its name.{did_you_mean(name, classes)}"
            )
        if not isinstance(given, Mapping):
            raise UserError(f"`arguments` of `{name}` is {given!r:.60}; give names and values")
    return {name: arguments.get(name, {}) for name in classes}
