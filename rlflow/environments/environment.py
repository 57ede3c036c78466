"""`Environment`: a user's settings of the environment that answers a policy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType, NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints, is_typeddict

from rlflow.dotted_path import function_at, object_at
from rlflow.environments.host import Coroutines, Host, InProcess
from rlflow.errors import UserError, did_you_mean, one_line
from rlflow.worker import Limits, Worker

OnFailure = Literal["raise", "zero", "mask"]


class Environment:
    """An environment that answers a policy, turn by turn.

    An environment is a class in one of two forms. In TRL's form, public methods with docstrings and types are tools
    that the policy may call, and a conversation ends when a turn calls no tool. In the form of Tinker's `MessageEnv`,
    `initial_observation` and `step` answer the policy's messages, and `step` ends the conversation.

    In both forms, `reset(**row)` may take columns of the dataset's row; the text that it returns in TRL's form is added
    to the prompt. In both forms, `get_reward` may return a reward at the end of a conversation. `step` also returns a
    reward for each turn; in TRL's form an attribute `reward` may replace `get_reward`. Methods may be coroutines. Each
    conversation has its own instance.

        class Echo:                                   # Tinker's form: `Environment("my_env.Echo", max_turns=1)`
            def reset(self, word):                    # the row's column `word`
                self.word = word

            def initial_observation(self):
                return f"say {self.word}"

            def step(self, message):
                return {"reward": float(message["content"] == self.word), "episode_done": True}

    With `trainer.partial_rollout` a conversation may be continued in a later step. Checkpoints can store it if the
    class has `state_dict()`, which returns JSON, and `load_state_dict(state)`, which is called on a new instance in
    place of `reset`.

    Args:
        environment: Dotted path of the class, or the class; None if there are only `tools`. For several environments, a
            mapping by name: `column` of each row names the one that answers.
        tools: Functions that the policy may call in addition to methods, or their dotted paths.
        arguments: Arguments of the class. For several environments, the arguments of each, by the same names. Each
            conversation has its own copy of lists, dicts, sets, arrays, tensors and random generators; other objects,
            such as a client, a lock, or an array of more than 1 MiB, are shared.
        column: The column of the dataset that names one of several environments.
        max_turns: Maximum number of turns of the policy.
        max_tool_calls: Maximum number of tool calls; further calls are refused. A turn whose calls are all refused ends
            the conversation. None for no limit.
        max_turn_length: Maximum number of tokens in a turn of the policy; None for as many as the response has left.
        timeout_s: Time limit of each call of the environment. The environment then runs in another process, which can
            be killed. None to run it in the rank's own process, with no limit.
        workers: Number of such processes on each rank, which is also its number of conversations at the same time.
        memory_mb: Memory limit of each of these processes, in MB; needs `timeout_s`.
        on_failure: Treatment of a conversation whose environment raises, takes too long or dies. `raise` ends the
            run. `zero` replaces the environment's rewards by 0. `mask` does the same, and leaves the conversation out
            of the loss. A tool that raises is not a failure: the policy reads the error.
        lockstep: With `timeout_s`, let the next turns of all open conversations of a rank begin together. Then engines
            compute the same batches in every run, in whatever order environments answer. Without `timeout_s` this is
            always so.
        max_concurrent: Maximum number of calls in progress at the same time on a rank, if methods or tools are
            coroutines and `timeout_s` is not set. Code without coroutines is called one call at a time.

    Raises:
        UserError: There is no such class, it has neither of the two forms, or a setting is not possible.
    """

    def __init__(
        self,
        environment: str | type | Mapping[str, str | type] | None = None,
        tools: Sequence[str | Callable[..., Any]] = (),
        arguments: Mapping[str, Any] | None = None,
        column: str = "environment",
        max_turns: int = 8,
        max_tool_calls: int | None = None,
        max_turn_length: int | None = None,
        timeout_s: float | None = None,
        workers: int = 8,
        memory_mb: int = 4096,
        on_failure: OnFailure = "raise",
        lockstep: bool = False,
        max_concurrent: int = 64,
    ) -> None:
        if not environment and not tools:
            raise UserError(
                "neither `environment` nor `tools` is given, so nothing answers the policy; give one of them"
            )
        counts = {
            "max_turns": max_turns,
            "workers": workers,
            "max_turn_length": max_turn_length,
            "max_concurrent": max_concurrent,
        }
        for name, count in {**counts, "max_tool_calls": max_tool_calls}.items():
            if count is not None and count < 1:
                raise UserError(f"`{name}` is {count}; give 1 or more")
        if on_failure not in get_args(OnFailure):
            raise UserError(f"`on_failure` is {on_failure!r}; give one of {', '.join(get_args(OnFailure))}")
        self.max_turns = max_turns
        self.max_tool_calls = max_tool_calls
        self.max_turn_length = max_turn_length
        self.on_failure = on_failure
        self._max_concurrent = max_concurrent
        self.workers = None if timeout_s is None else workers
        self.lockstep = lockstep or timeout_s is None
        self.limits = None if timeout_s is None else Limits(timeout_s=timeout_s, memory_mb=memory_mb)
        self.column = column if isinstance(environment, Mapping) else None
        self._classes = dict(environment) if isinstance(environment, Mapping) else {"": environment}
        self._arguments = _arguments(self._classes, arguments or {}) if self.column else {"": arguments or {}}
        self._tools = tuple(tools)

    @cached_property
    def definitions(self) -> dict[str, Definition]:
        """The methods and tools of each class, read once: by the class's name in rows, or "" if there is one class."""
        made = {name: defined(cls, self._tools, self._arguments[name]) for name, cls in self._classes.items()}
        tools = [tool.path for each in made.values() for tool in each.tools.values() if not tool.method]
        paths = [*(each.path for each in made.values()), *tools]
        own = next((path for path in paths if path.startswith("__main__.")), None)
        if self.limits is not None and own is not None:
            raise UserError(
                f"`timeout_s` is {self.limits.timeout_s:g}, and `{own}` is in the script that runs, which no other"
                " process can import; move it to a module"
            )
        return made

    def definition_of(self, row: Mapping[str, Any]) -> Definition:
        """The definition of the environment that answers this row of the dataset.

        Raises:
            UserError: There are several environments, and the row names none of them.
        """
        if self.column is None:
            return self.definitions[""]
        if self.column not in row:
            raise UserError(
                f"`column` is {self.column!r}, the column that says which environment answers, and a row has none"
                f" (it has {', '.join(row)}).{did_you_mean(self.column, row) or ' Add the column'}"
            )
        name = row[self.column]
        if not isinstance(name, str) or name not in self._classes:
            raise UserError(
                f"a row has {name!r:.60} in `{self.column}`, and `environment` has {', '.join(self._classes)}."
                f"{did_you_mean(str(name), self._classes) or ' Name one of them'}"
            )
        return self.definitions[name]

    def seats_of(self, policy: str, players: Mapping[str, str]) -> tuple[str, ...]:
        """The seats that a policy plays, in their order; one seat without a name if the environment has no seats.

        Args:
            policy: Policy that plays all seats that no other policy plays.
            players: The other policies, by the name of the seat that each plays.

        Raises:
            UserError: There is no such seat, no seat is left, or several environments have different seats.
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
                f"`players` has all seats of {self}, {_named(first)}, so none is left for the model that converses;"
                " leave one out"
            )
        return own or ("",)

    @cached_property
    def overlaps(self) -> bool:
        """Whether calls in the rank's own process run concurrently: they do if a method or tool is a coroutine."""
        return self.workers is None and any(each.awaits for each in self.definitions.values())

    @property
    def max_concurrent_calls(self) -> int:
        """Number of calls that a rank makes at the same time."""
        return self.workers or (self._max_concurrent if self.overlaps else 1)

    def __str__(self) -> str:
        return ", ".join(each.path or "tools" for each in self.definitions.values())

    def host(self, coroutines: Coroutines | None = None) -> Host:
        """Host of the environment of one conversation; in the rank's own process it runs with `coroutines`."""
        return InProcess(coroutines, self.overlaps) if self.limits is None else Worker(self.limits)


def _named(definition: Definition) -> str:
    return ", ".join(definition.seats) or "none"


def _arguments(classes: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The arguments of each class, where there are several."""
    for name, given in arguments.items():
        if name not in classes:
            raise UserError(
                f"`arguments` has `{name}`, and `environment` has {', '.join(classes)}; of several environments,"
                f" give the arguments of each by its name.{did_you_mean(name, classes)}"
            )
        if not isinstance(given, Mapping):
            raise UserError(f"`arguments` of `{name}` is {given!r:.60}; give names and values")
    return {name: arguments.get(name, {}) for name in classes}


@dataclass(frozen=True, eq=False)
class Definition:
    """An environment's class, and which methods and tools it has.

    Attributes:
        tools: Tools that the policy may call, by name.
        path: Dotted path of the class; empty where there are functions as tools alone.
        arguments: Arguments that it is made with, by name.
        answers_messages: Whether it has `initial_observation` and `step`, and no tools.
        resets: Whether it has `reset`.
        columns: Names of the row's columns that `reset` takes; None for all of them.
        required: Names among `columns` that `reset` has no default for.
        rewards: Whether it has `get_reward`.
        rewards_groups: Whether it has `get_group_rewards`.
        keeps_state: Whether it can be continued in another process, by `state_dict` and `load_state_dict`; tools alone
            can.
        seats: Names of the seats that speak in it; empty if there is one, without a name.
        awaits: Whether it has a method or a tool that is a coroutine.
        repeats: Whether all messages are written again in each turn, so that a template may change earlier ones.
    """

    tools: Mapping[str, Tool]
    path: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    answers_messages: bool = False
    resets: bool = False
    columns: tuple[str, ...] | None = None
    required: tuple[str, ...] = ()
    rewards: bool = False
    rewards_groups: bool = False
    keeps_state: bool = False
    seats: tuple[str, ...] = ()
    awaits: bool = False
    repeats: bool = False

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """The JSON schemas of the tools, in their order."""
        return [tool.schema for tool in self.tools.values()]

    def given(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The columns of a row of the dataset that `reset` takes.

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
    """Read the definition of an environment.

    Args:
        environment: The class or its dotted path; None for an environment of tools alone.
        tools: Functions that the policy may call in addition to the methods, or their dotted paths.
        arguments: Arguments that the class is made with, by name.

    Raises:
        UserError: There is no such class, it has neither tools nor `step`, or both, or does not take the arguments; or
            for the reasons of `tools_of`.
    """
    if environment is None:
        functions = tools_of(None, tools)
        return Definition(functions, keeps_state=True, awaits=_awaits(None, functions))
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
            " the policy is shown; leave `tools` out, or write an environment whose methods are tools"
        )
    try:
        inspect.signature(cls).bind(**arguments)
    except TypeError as error:
        raise UserError(f"`arguments` do not fit `{path}`, which is made with them: {error}; correct them") from error
    if hasattr(cls, "initial_observation") and (needed := _parameters(cls.initial_observation)[1]):
        raise UserError(
            f"`{path}.initial_observation` takes `{needed[0]}`, and it is called without arguments; take columns of the"
            " row in `reset`, which is called before"
        )
    columns, required = _parameters(cls.reset) if hasattr(cls, "reset") else (None, ())
    return Definition(
        found,
        path,
        arguments,
        answers_messages,
        resets=hasattr(cls, "reset"),
        columns=columns,
        required=required,
        rewards=hasattr(cls, "get_reward"),
        rewards_groups=hasattr(cls, "get_group_rewards"),
        keeps_state=_keeps_state(cls, path),
        seats=_seats(cls, path, arguments, answers_messages),
        awaits=_awaits(cls, found),
    )


def _awaits(cls: type | None, tools: Mapping[str, Tool]) -> bool:
    methods = [] if cls is None else [getattr(cls, name, None) for name in (*NOT_TOOLS, *tools)]
    functions = [object_at(tool.path, f"`tools` has {tool.path!r}") for tool in tools.values() if not tool.method]
    return any(map(inspect.iscoroutinefunction, [*methods, *functions]))


def _parameters(method: Callable[..., Any]) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """The parameters of a method by name, None for any, and those that it needs."""
    parameters = [p for p in inspect.signature(method).parameters.values() if p.name != "self"]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    anything = any(p.kind == p.VAR_KEYWORD for p in parameters)
    needed = tuple(p.name for p in named if p.default is p.empty)
    return None if anything else tuple(p.name for p in named), needed


def _keeps_state(cls: type, path: str) -> bool:
    found = [name for name in ("state_dict", "load_state_dict") if hasattr(cls, name)]
    if len(found) == 1:
        raise UserError(
            f"`{path}` has `{found[0]}` alone; a conversation is continued by both `state_dict` and `load_state_dict`,"
            " so write the other one, or neither"
        )
    return bool(found)


def _seats(cls: type, path: str, arguments: Mapping[str, Any], answers_messages: bool) -> tuple[str, ...]:
    """An attribute of the class, or a class method of the arguments that it is made with."""
    given = getattr(cls, "seats", ())
    seats = given(**arguments) if callable(given) else given
    names = not isinstance(seats, str) and all(isinstance(seat, str) and seat for seat in seats)
    if not names or len({*seats}) < len(seats):
        raise UserError(f"`{path}.seats` is {seats!r:.60}; give names, each once, such as ('player', 'opponent')")
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


JSON_TYPES = (str, int, float, bool, list, dict, tuple, NoneType, None, Any, ...)
NOT_TOOLS = frozenset(
    {
        "close",
        "get_group_rewards",
        "get_reward",
        "initial_observation",
        "load_state_dict",
        "reset",
        "seats",
        "state_dict",
        "step",
    }
)


@dataclass(frozen=True)
class Tool:
    """A tool that a policy may call.

    Attributes:
        name: Name by which the policy calls it.
        schema: JSON schema of a function, as chat templates take it.
        method: Whether it is a method of the environment; else a function of its own.
        path: Dotted path of a function, by which a worker imports it; for a method its class and name, for messages.
    """

    name: str
    schema: Mapping[str, Any]
    method: bool
    path: str

    def missing_or_unknown(self, arguments: Mapping[str, Any]) -> str:
        """The fault in the names of arguments, in words for the policy; empty if there is none."""
        parameters = self.schema["function"]["parameters"]
        known, required = parameters.get("properties", {}), parameters.get("required", ())
        if unknown := [name for name in arguments if name not in known]:
            return f"{self.name} takes no argument `{unknown[0]}`; it takes {', '.join(known) or 'none'}"
        if missing := [name for name in required if name not in arguments]:
            return f"{self.name} needs the argument `{missing[0]}`"
        return ""


def tools_of(environment: type | None, functions: Sequence[str | Callable[..., Any]] = ()) -> dict[str, Tool]:
    """The tools of an environment's class, its public methods, and of functions, by name.

    Where one cannot work on every system, it has an attribute `check_system`, which is called here, before the run.

    Args:
        environment: The class; None where there are functions alone.
        functions: Functions, or dotted paths of functions.

    Raises:
        UserError: One has no docstring, or a parameter without a type or with one that has no schema; two have one
            name; or one cannot work here.
    """
    _check_system(environment)
    tools: dict[str, Tool] = {}
    methods = inspect.getmembers(environment, inspect.isfunction) if environment is not None else []
    for name, method in methods:
        if not name.startswith("_") and name not in NOT_TOOLS:
            tools[name] = Tool(name, _schema(method, method.__qualname__), method=True, path=method.__qualname__)
    for given in functions:
        function = function_at(given, f"`tools` has {given!r}") if isinstance(given, str) else given
        path, name = _path(function), function.__name__
        _check_system(function)
        if name in tools:
            raise UserError(f"two tools have the name `{name}`, `{tools[name].path}` and `{path}`; rename one of them")
        tools[name] = Tool(name, _schema(function, path), method=False, path=path)
    return tools


def _check_system(tool: Any) -> None:
    """Call the `check_system` of a function or a class, if it has one.

    Raises:
        UserError: It cannot work here.
    """
    if (check := getattr(tool, "check_system", None)) is not None:
        check()


def _path(function: Callable[..., Any]) -> str:
    """The dotted path by which a worker imports a function."""
    path = f"{function.__module__}.{getattr(function, '__qualname__', '<object>')}"
    if "<" in path:
        raise UserError(
            f"tool `{path}` is not a function at the top of a module, where it is looked for; move it there"
        )
    return path


def _schema(function: Callable[..., Any], path: str) -> Mapping[str, Any]:
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        schema: Mapping[str, Any] = get_json_schema(function)
        by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        unnamed = [each for each in inspect.signature(function).parameters.values() if each.kind not in by_name]
        found = {name: _no_json(hint) for name, hint in get_type_hints(function).items() if name != "return"}
        problem = (
            f"{unnamed[0]} is given without a name, or by any"
            if unnamed
            else next((f"`{name}` is of type {x}, which JSON does not have" for name, x in found.items() if x), "")
        )
    except (DocstringParsingException, TypeHintParsingException, NameError) as error:
        problem = one_line(error)
    if problem:
        raise UserError(
            f"tool `{path}` has no schema ({problem}); write a docstring, which tells the policy what it does, and give"
            " each parameter a type such as str, int, float, bool or list[str], and a line under `Args:`"
        )
    return schema


def _no_json(hint: Any) -> str:
    """The type in a hint that is none of JSON's; empty where there is none."""
    if get_origin(hint) is Literal or hint in JSON_TYPES or is_typeddict(hint):
        return ""
    if parts := get_args(hint):
        return next((found for part in parts if (found := _no_json(part))), "")
    return getattr(hint, "__name__", str(hint))
