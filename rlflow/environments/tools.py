"""Tools: functions and methods that a policy may call, with what their schema says of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints, is_typeddict

from rlflow.dotted_path import function_at
from rlflow.errors import UserError, one_line

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
    """What a policy may call.

    Attributes:
        name: By which it calls.
        schema: JSON schema of a function, as chat templates take it.
        method: Whether it is a method of the environment; else a function of its own.
        path: Of a function, dotted, so that a worker can import it.
    """

    name: str
    schema: Mapping[str, Any]
    method: bool
    path: str = ""

    def missing_or_unknown(self, arguments: Mapping[str, Any]) -> str:
        """What is wrong with the names of arguments, in words for the policy; empty where nothing is."""
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
    paths: dict[str, str] = {}
    methods = inspect.getmembers(environment, inspect.isfunction) if environment is not None else []
    for name, method in methods:
        if not name.startswith("_") and name not in NOT_TOOLS:
            paths[name] = method.__qualname__
            tools[name] = Tool(name, _schema(method, paths[name]), method=True)
    for given in functions:
        function = function_at(given, f"`tools` has {given!r}") if isinstance(given, str) else given
        if not callable(function):
            raise UserError(f"`tools` has {given!r}, which is {function!r:.60} and no function; name one")
        path, name = _path(function), function.__name__
        _check_system(function)
        if paths.get(name) == path:
            raise UserError(f"`tools` has `{path}` twice; leave one of them out")
        if name in tools:
            raise UserError(f"two tools have the name `{name}`, `{paths[name]}` and `{path}`; rename one of them")
        paths[name] = path
        tools[name] = Tool(name, _schema(function, path), method=False, path=path)
    return tools


def _check_system(tool: Any) -> None:
    """Call what a function or a class has under this name.

    Raises:
        UserError: It cannot work here.
    """
    if (check := getattr(tool, "check_system", None)) is not None:
        check()


def _path(function: Callable[..., Any]) -> str:
    """By which a worker imports it."""
    path = f"{function.__module__}.{getattr(function, '__qualname__', '<object>')}"
    if "<" in path:
        raise UserError(f"tool `{path}` is no function at the top of a module, where it is looked for; move it there")
    return path


def _schema(function: Callable[..., Any], path: str) -> Mapping[str, Any]:
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    if not inspect.getdoc(function):
        raise UserError(f"tool `{path}` has no docstring, which tells the policy what it does; write one")
    try:
        schema: Mapping[str, Any] = get_json_schema(function)
        problem = _without_schema(function)
    except (DocstringParsingException, TypeHintParsingException, NameError) as error:
        problem = one_line(error)
    if problem:
        raise UserError(
            f"tool `{path}` has no schema ({problem}); give each parameter a type such as str, int, float, bool"
            " or list[str], and a line under `Args:`"
        )
    return schema


def _without_schema(function: Callable[..., Any]) -> str:
    """What is wrong with the types of parameters that a call's JSON has to become; empty where nothing is."""
    hints = get_type_hints(function)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            return f"{parameter} is given without a name, or by any"
        if found := _no_json(hints.get(parameter.name, Any)):
            return f"`{parameter.name}` is of type {found}, which JSON does not have"
    return ""


def _no_json(hint: Any) -> str:
    """The type in a hint that is none of JSON's; empty where there is none."""
    if get_origin(hint) is Literal or hint in JSON_TYPES or is_typeddict(hint):
        return ""
    if parts := get_args(hint):
        return next((found for part in parts if (found := _no_json(part))), "")
    return getattr(hint, "__name__", str(hint))
