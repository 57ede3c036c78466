"""Finds the object of a dotted path that a user wrote: a class, a function, a method, a value in a row."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from rlflow.errors import UserError, did_you_mean, one_line, readable_line

NOT_FOR_MODELS = ("numpy", "torch")  # libraries that read and write files by their names


def object_at(path: str, subject: str, known: Iterable[str] = ()) -> Any:
    """The object that a path names: the longest part of it that is a module, then attributes of that module.

    Args:
        path: Dotted path, such as `my_env.WordGame`.
        subject: Beginning of the error, with the path: "`function` is 'my_rewards.brevity'".
        known: Modules that may be meant where there is none of that name; those in the working directory are known.

    Raises:
        UserError: It is not a path, its module is not there or cannot be imported, or has nothing of that name.
    """
    names = path.split(".")
    if len(names) < 2 or not all(each.isidentifier() for each in names):
        raise UserError(f"{subject}, which is not a path of a module and a name in it; write module.name")
    module, rest = _longest_module(names, subject, known)
    found: Any = module
    where = module.__name__
    for name in rest:
        if not hasattr(found, name):
            hint = did_you_mean(name, dir(found)) or " Check the path"
            raise UserError(f"{subject}, but {where} has no {name}.{hint}")
        found, where = getattr(found, name), f"{where}.{name}"
    return found


def function_at(path: str, subject: str) -> Callable[..., Any]:
    """The function at a path. Python's own are refused, as it will be called with texts of a model.

    Args:
        path: Dotted path, such as `my_rewards.brevity`.
        subject: Beginning of the error, with the path.

    Raises:
        UserError: As `object_at`; or it is not a function, or one such as `os.system` or `builtins.exec`.
    """
    found = object_at(path, subject)
    if not callable(found):
        raise UserError(f"{subject}, which is {found!r:.60} and no function; name one")
    function = found
    while isinstance(function, partial):
        function = function.func
    library = (getattr(function, "__module__", None) or type(function).__module__).partition(".")[0]
    if library in sys.stdlib_module_names or library in NOT_FOR_MODELS:
        raise UserError(
            f"{subject}, a function of {library}, and it would be called with what a model writes; name one of your"
            " own, such as my_module.my_function"
        )
    return cast(Callable[..., Any], found)


def value_at(row: Mapping[str, Any], path: str) -> Any:
    """The row's column of that name; else dots step into its mappings, as in `metadata.expression`.

    Example:
        Of `{"question": "1+1", "metadata": {"answer": "2"}}` the value at `metadata.answer` is `"2"`.

    Raises:
        KeyError: The row has neither.
    """
    if path in row:
        return row[path]
    value: Any = row
    for step in path.split("."):
        if not isinstance(value, Mapping):
            raise KeyError(path)
        value = value[step]
    return value


def column_of(row: Mapping[str, Any], path: str, place: str, why: str = "") -> Any:
    """`value_at`, for a column that the row must have; `place` of the row, and `why` it is read, are in the error.

    Raises:
        UserError: The row has no such column.
    """
    try:
        return value_at(row, path)
    except KeyError:
        found = ", ".join(readable_line(str(name)) for name in row)
        hint = did_you_mean(path, row)
        raise UserError(f"{place} has no column `{path}`{why}; columns found: {found}.{hint}") from None


def _longest_module(names: list[str], subject: str, known: Iterable[str]) -> tuple[ModuleType, list[str]]:
    """The module that the longest beginning of the names is, and the names after it."""
    for length in range(len(names) - 1, 0, -1):
        name = ".".join(names[:length])
        try:
            return import_module(name), names[length:]
        except UserError:
            raise
        except Exception as error:  # whatever the user's own module raises
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing is None or not f"{name}.".startswith(f"{missing}."):  # it is there, and something in it fails
                kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
                raise UserError(
                    f"{subject}, which cannot be imported ({kind}{one_line(error)}); correct its module"
                ) from error
    hint = did_you_mean(".".join(names[:-1]), [*known, *(file.stem for file in Path.cwd().glob("*.py"))])
    raise UserError(f"{subject}, but there is no module {names[0]}.{hint or ' Check the path'}")
