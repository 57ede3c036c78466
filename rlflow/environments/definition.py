"""What a user's environment is: read from its class once, before the run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rlflow.dotted_path import object_at
from rlflow.environments.tools import NOT_TOOLS, Tool, tools_of
from rlflow.errors import UserError, did_you_mean


@dataclass(frozen=True, eq=False)
class Definition:
    """An environment's class and what it has.

    Attributes:
        path: Dotted, of the class; empty where there are functions as tools alone.
        arguments: That it is made with, by name.
        tools: By name.
        answers_messages: Whether it has `initial_observation` and `step`, and no tools.
        resets: Whether it has `reset`, and the names of the row's columns that this takes; None for all of them.
        rewards: Whether it has `get_reward`.
        rewards_groups: Whether it has `get_group_rewards`.
        keeps_state: Whether it can be continued in another process, by `state_dict` and `load_state_dict`; tools alone
            can.
        seats: The names of those who speak in it; empty where there is one, without a name.
        awaits: Whether it has a method or a tool that is a coroutine.
    """

    path: str
    arguments: Mapping[str, Any]
    tools: Mapping[str, Tool]
    answers_messages: bool
    resets: bool
    columns: tuple[str, ...] | None
    required: tuple[str, ...]
    rewards: bool
    rewards_groups: bool = False
    keeps_state: bool = False
    seats: tuple[str, ...] = ()
    awaits: bool = False

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """Of the tools, in their order."""
        return [tool.schema for tool in self.tools.values()]

    def given(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """What `reset` gets of a row of the dataset.

        Raises:
            UserError: The row lacks a column that it needs.
        """
        if missing := [name for name in self.required if name not in row]:
            raise UserError(
                f"`{self.path}.reset` takes `{missing[0]}`, which the row does not have (it has {', '.join(row)})."
                f"{did_you_mean(missing[0], row) or ' Add the column, or give the parameter a default'}"
            )
        return dict(row) if self.columns is None else {name: row[name] for name in self.columns if name in row}


def defined(
    environment: str | type | None,
    tools: Sequence[str | Callable[..., Any]] = (),
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> Definition:
    """Read an environment.

    Args:
        environment: The class or its dotted path; None for an environment of tools alone.
        tools: Functions that the policy may call beside the methods, or their dotted paths.
        arguments: That the class is made with, by name.

    Raises:
        UserError: There is no such class, it has neither tools nor `step`, or both, or does not take the arguments; or
            as of `tools_of`.
    """
    if environment is None:
        functions = tools_of(None, tools)
        awaits = _awaits(None, functions)
        return Definition("", {}, functions, False, False, None, (), False, keeps_state=True, awaits=awaits)
    cls = _class_at(environment) if isinstance(environment, str) else environment
    path = f"{cls.__module__}.{cls.__qualname__}"
    answers_messages = hasattr(cls, "step") and hasattr(cls, "initial_observation")
    found = tools_of(None if answers_messages else cls, tools)
    if not answers_messages and not found:
        raise UserError(
            f"environment `{path}` has no public method for the policy to call, and no `initial_observation` and `step`"
            " to answer its messages; write one or the other"
        )
    if answers_messages and found:
        raise UserError(
            f"environment `{path}` answers messages by `step`, so nothing would call the tools {', '.join(found)} that"
            " the policy reads of; leave `tools` out, or write an environment whose methods are tools"
        )
    _require_arguments(cls, path, arguments)
    _require_no_columns(cls, path)
    columns, required = _parameters(cls.reset) if hasattr(cls, "reset") else (None, ())
    return Definition(
        path,
        arguments,
        found,
        answers_messages,
        hasattr(cls, "reset"),
        columns,
        required,
        hasattr(cls, "get_reward"),
        hasattr(cls, "get_group_rewards"),
        _keeps_state(cls, path),
        _seats(cls, path, arguments, answers_messages),
        _awaits(cls, found),
    )


def _awaits(cls: type | None, tools: Mapping[str, Tool]) -> bool:
    methods = [] if cls is None else [getattr(cls, name, None) for name in (*NOT_TOOLS, *tools)]
    functions = [object_at(tool.path, f"`tools` has {tool.path!r}") for tool in tools.values() if not tool.method]
    return any(map(inspect.iscoroutinefunction, [*methods, *functions]))


def _parameters(method: Callable[..., Any]) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """The names that a method or a class takes, None for any, and those that it needs."""
    parameters = [p for p in inspect.signature(method).parameters.values() if p.name != "self"]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    anything = any(p.kind == p.VAR_KEYWORD for p in parameters)
    needed = tuple(p.name for p in named if p.default is p.empty)
    return None if anything else tuple(p.name for p in named), needed


def _require_arguments(cls: type, path: str, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that the class is not made with, and the lack of those that it needs."""
    known, needed = _parameters(cls)
    if known is not None and (unknown := [name for name in arguments if name not in known]):
        takes = f"takes {', '.join(known)}" if known else "takes none"
        raise UserError(
            f"`arguments` has `{unknown[0]}`, and `{path}` {takes}.{did_you_mean(unknown[0], known) or ' Leave it out'}"
        )
    if missing := [name for name in needed if name not in arguments]:
        raise UserError(f"`{path}` is made with `{missing[0]}`, which `arguments` does not have; add it there")


def _keeps_state(cls: type, path: str) -> bool:
    found = [name for name in ("state_dict", "load_state_dict") if hasattr(cls, name)]
    if len(found) == 1:
        raise UserError(
            f"`{path}` has `{found[0]}` alone; a conversation is continued by both `state_dict` and `load_state_dict`,"
            " so write the other one, or neither"
        )
    return bool(found)


def _require_no_columns(cls: type, path: str) -> None:
    """Refuse an `initial_observation` that takes the row: `reset` does."""
    needed = _parameters(cls.initial_observation)[1] if hasattr(cls, "initial_observation") else ()
    if needed:
        raise UserError(
            f"`{path}.initial_observation` takes `{needed[0]}`, and it is called without anything; take columns of the"
            " row in `reset`, which is called before"
        )


def _seats(cls: type, path: str, arguments: Mapping[str, Any], answers_messages: bool) -> tuple[str, ...]:
    """An attribute of the class, or a class method of the arguments that it is made with."""
    given = getattr(cls, "seats", ())
    seats = given(**arguments) if callable(given) else given
    if isinstance(seats, str) or not all(isinstance(seat, str) and seat for seat in seats):
        raise UserError(f"`{path}.seats` is {seats!r:.60}; give names, such as ('player', 'opponent')")
    if len(set(seats)) < len(seats):
        raise UserError(f"`{path}.seats` names one seat twice: {', '.join(seats)}; give each a name of its own")
    if seats and not answers_messages:
        raise UserError(
            f"`{path}` has `seats` and no `initial_observation` and `step`, which say who speaks next; write them"
        )
    return tuple(seats)


def _class_at(path: str) -> type:
    found = object_at(path, f"`environment` is {path!r}")
    if not isinstance(found, type):
        raise UserError(f"`environment` is {path!r}, which is {found!r:.60} and no class; name one")
    return found
