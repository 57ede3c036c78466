"""Names, types and defaults of constructors' arguments, from which a config's keys follow."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from types import NoneType
from typing import Any, get_args, get_origin

from rlflow.dag.annotations import choices, hints_of


@dataclass(frozen=True)
class Argument:
    """One argument of a constructor, or one key of a config.

    Attributes:
        hint: Type, such as `int | None`; a `Group` for a key with keys below it.
        required: Whether it has no default.
        default: The default; None if it is required.
    """

    hint: Any
    required: bool = False
    default: Any = None


@dataclass(frozen=True)
class Group:
    """The keys below one key of a config: a section such as `trainer`, or the whole config with its sections.

    Attributes:
        arguments: Arguments by key, `{"max_steps": Argument(int | None), ...}`.
    """

    arguments: Mapping[str, Argument]


def arguments_of(cls: type) -> dict[str, Argument]:
    """The arguments of a constructor by name, with those of its bases' constructors where it takes `**kwargs`.

    `def __init__(self, lr: float, steps: int | None = None)` gives

        {"lr": Argument(float, required=True), "steps": Argument(int | None)}

    Args:
        cls: The class. If several constructors name an argument, the subclass's counts.
    """
    found: dict[str, Argument] = {}
    for owner in cls.__mro__:
        constructor = vars(owner).get("__init__")
        if not inspect.isfunction(constructor):
            continue
        hints = hints_of(owner) | hints_of(constructor)
        parameters = list(inspect.signature(constructor).parameters.values())[1:]
        for each in parameters:
            if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
                hint = hints.get(each.name, Any)
                if each.default is None and hint is not Any:
                    hint = hint | None
                default = None if each.default is each.empty else each.default
                found.setdefault(each.name, Argument(hint, each.default is each.empty, default))
        if all(each.kind is not each.VAR_KEYWORD for each in parameters):
            break
    return found


def chosen_classes(hint: Any) -> list[type]:
    """The classes of a type, possibly a union, from which a config chooses by `class_path`; no plain dataclasses."""
    return [each for each in _classes(hint) if not is_plain_dataclass(each)]


def is_choice(hint: Any, value: Any) -> bool:
    """Whether a config's value is a mapping that describes an object of `chosen_classes(hint)`.

    It has `class_path` or `init_args`, or is the arguments alone: `{timeout_s: 60}` for `TrainingStrategy | None`.
    """
    classes = chosen_classes(hint)
    if not classes or not isinstance(value, Mapping):
        return False
    if "class_path" in value or "init_args" in value:
        return True
    if entry_hint(hint, dict) is not None:
        return False
    fields = fields_of(hint, value)
    return fields is None or not (value.keys() <= fields.keys() or all(inspect.isabstract(each) for each in classes))


def entry_hint(hint: Any, kind: type) -> Any:
    """The type of the entries of a list, or of the values of a mapping.

    Args:
        hint: The type of the whole, which may be a union.
        kind: `list` or `dict`.

    Returns:
        `str` for `list[str] | None`, `Any` for `list`, and None for a type that is not a list or has a fixed length.
    """
    wanted = Mapping if kind is dict else Sequence
    for choice in choices(hint):
        plain, parts = get_origin(choice) or choice, get_args(choice)
        is_fixed = plain is tuple and parts and Ellipsis not in parts
        if choice is Any:
            return Any
        if isinstance(plain, type) and issubclass(plain, wanted) and not issubclass(plain, str) and not is_fixed:
            return parts[-1 if kind is dict else 0] if parts else Any
    return None


def implied_class(classes: Sequence[type]) -> type | None:
    """The class of arguments that have no `class_path`: the only one, if it is not abstract and takes any."""
    if len(classes) != 1 or inspect.isabstract(classes[0]):
        return None
    return classes[0] if arguments_of(classes[0]) else None


def fields_of(hint: Any, keys: Mapping[str, Any]) -> dict[str, Argument] | None:
    """The arguments of the dataclass of a type that a config writes without `class_path`; None where there is none."""
    cls = plain_dataclass(hint, keys)
    return None if cls is None else arguments_of(cls)


def plain_dataclass(hint: Any, keys: Mapping[str, Any]) -> type | None:
    """The dataclass of a type, which may be a union: the first that has all these keys; None if there is none."""
    found = [each for each in _classes(hint) if is_plain_dataclass(each)]
    fitting = (each for each in found if keys.keys() <= arguments_of(each).keys())
    return next(fitting, found[0] if found else None)


def is_configured(cls: type) -> bool:
    """Whether a config writes a value of this class as a mapping of its arguments."""
    return cls in _classes(cls)


def is_plain_dataclass(cls: type) -> bool:
    """Whether a config writes its fields alone: a dataclass, and so are all its bases."""
    return all(dataclasses.is_dataclass(each) for each in cls.__mro__[:-1])


def _classes(hint: Any) -> Iterator[type]:
    for choice in choices(hint):
        if not isinstance(choice, type) or get_origin(choice) is not None or choice in (Any, object):
            continue
        if not issubclass(choice, _VALUES) and choice.__module__ not in ("collections.abc", "typing"):
            yield choice


_VALUES = (NoneType, str, bytes, int, float, complex, list, tuple, set, frozenset, dict, Enum, PurePath)  # of YAML
