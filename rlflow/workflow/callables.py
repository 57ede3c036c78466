"""Functions by dotted path, and values of a config as the types of their parameters."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import MethodType, NoneType
from typing import Any, get_type_hints

from jsonargparse import ArgumentParser

from rlflow.config.building import built
from rlflow.config.checking import mistakes_of
from rlflow.config.errors import ConfigError
from rlflow.config.merging import written_whole
from rlflow.dag.annotations import choices
from rlflow.dotted_path import object_at
from rlflow.errors import UserError, did_you_mean, one_line
from rlflow.module import RLModule, handles


def found_at(path: str, module: RLModule) -> Callable[..., Any]:
    """What a node calls: a method of the module (`generate`) or of one of its models (`actor.logprobs`), or a function.

    Raises:
        UserError: There is none of that path.
    """
    first, _, rest = path.partition(".")
    model = handles(module).get(first)
    if not rest:
        return MethodType(_method(path, first, type(module)), module)
    if model is not None:
        return MethodType(_method(path, rest, type(model)), model)
    function: Callable[..., Any] = _imported(path, module)
    if not callable(function):
        raise UserError(f"calls {path}, and that is {function!r:.40}, no function. Name one")
    return function


def hints_of(function: Callable[..., Any], path: str) -> dict[str, Any]:
    """The types of its parameters, and its `return`, as far as they are written.

    Raises:
        UserError: They cannot be read, or it has no signature.
    """
    try:
        inspect.signature(function)
        return get_type_hints(function, include_extras=True)
    except (NameError, AttributeError, TypeError, ValueError, SyntaxError) as error:  # of the user's own code
        why = f"calls {path}, whose parameters cannot be read ({one_line(error)})"
        raise UserError(f"{why}. Correct them, or call a function of your own that calls it") from error


def typed(name: str, value: Any, annotation: Any) -> Any:
    """A value of a config as the type of the parameter `name`; as it is where the type says nothing to a config.

    Raises:
        UserError: It is not of that type.
    """
    others = [choice for choice in choices(annotation) if choice is not NoneType]
    if value is not None and len(others) == 1:
        (annotation,) = others  # whose complaints are plainer than a union's
    keys = (name,)
    value = written_whole(value, annotation)
    for mistake in mistakes_of(value, annotation, keys):
        raise ConfigError(mistake)
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_argument(f"--{name}", type=annotation)
    except ValueError:  # jsonargparse knows no values of such a type
        return value
    return built(parser.parse_object({name: value})[name], annotation, keys, ".".join)


def _method(path: str, name: str, cls: type) -> Callable[..., Any]:
    function: Callable[..., Any] | None = getattr(cls, name, None)
    if name.startswith("_") or not callable(function):
        known = [each for each in dir(cls) if not each.startswith("_") and inspect.isfunction(getattr(cls, each))]
        hint = (
            did_you_mean(name, known) or f" It has {', '.join(known)}; any other function is written as file.function."
        )
        raise UserError(f"calls {path}, and {cls.__name__} has no method {name}.{hint}")
    return function


def _imported(path: str, module: RLModule) -> Any:
    first = path.partition(".")[0]
    if first not in sys.modules and find_spec(first) is None:
        known = [*handles(module), *(file.stem for file in Path.cwd().glob("*.py")), "rlflow"]
        hint = did_you_mean(first, known) or f" The models are {', '.join(handles(module)) or 'none'}."
        raise UserError(f"calls {path}, and there is neither a model nor a module {first}.{hint}")
    return object_at(path, f"calls {path}")
