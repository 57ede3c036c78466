"""Checks a config against the types of what it configures; each mistake has the key, the value and what to give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from inspect import isabstract
from itertools import pairwise
from math import isnan
from pathlib import PurePath
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from rlflow.config.arguments import (
    Argument,
    Group,
    arguments_of,
    chosen_classes,
    entry_hint,
    fields_of,
    is_choice,
    is_configured,
    is_plain_dataclass,
)
from rlflow.config.command_line import Text
from rlflow.dag.annotations import choices
from rlflow.errors import UserError, did_you_mean, readable_line
from rlflow.lightning_names import CONFIG_KEYS, instead_of
from rlflow.loggers.secrets import HIDDEN, is_secret, without_secrets
from rlflow.short_names import class_named, such_as

MOST = 2**63 - 1
_SCALARS: dict[Any, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}
_SCALARS |= {PurePath: "a path", Callable: "the path of a function"}
_TO_CHOOSE = {"class_path", "init_args", "dict_kwargs"}


@dataclass(frozen=True)
class Mistake:
    """A mistake in a config, with its key.

    Example:
        In `trainer: {max_steps: many}` the keys are `("trainer", "max_steps")`, the value is `"many"`, and what is
        found is "is {value}; give an integer or null".

    Attributes:
        keys: Place in the tree in which classes are written whole.
        found: Description of the mistake; `{value}` is replaced by the value.
        value: The value there; None if it is missing.
        of_type: Whether the value is not of its type. Such mistakes are reported before jsonargparse parses the config;
            the others only if it fails.
    """

    keys: tuple[str, ...]
    found: str
    value: Any = None
    of_type: bool = False

    def error(self, keys: Sequence[str]) -> UserError:
        """The error for the user: "`trainer.max_steps` is 'many'; give an integer or null". Secrets are hidden.

        Args:
            keys: The place, as the user wrote it.
        """
        value = self.value.value if isinstance(self.value, Text) else self.value
        shown = "null" if value is None else f"{without_secrets(value)!r:.80}"
        if any(is_secret(key, value) for key in keys):
            shown = HIDDEN
        key = ".".join(readable_line(each[:80]) for each in keys)
        error = UserError(f"`{key}` {self.found.replace('{value}', shown)}")
        error.settings = (key,)
        return error


def mistakes_of(value: Any, hint: Any, keys: tuple[str, ...] = ()) -> Iterator[Mistake]:
    """Everything that is wrong with a value of this type, which is at `keys` of a config; missing keys come last."""
    fields = hint.arguments if isinstance(hint, Group) else None
    if isinstance(value, Mapping) and fields is None:
        if is_choice(hint, value):
            yield from _of_class(value, chosen_classes(hint), keys)
            return
        fields = fields_of(hint, value)
    if isinstance(value, Mapping) and fields is not None:
        yield from _of_arguments(value, fields, keys)
    elif isinstance(value, Mapping | list) and (
        inner := entry_hint(hint, dict if isinstance(value, Mapping) else list)
    ):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            if isinstance(value, Mapping) and not isinstance(key, str) and inner is not Any:
                found = f'({{value}}) has the key {key}, and a key must be text; write "{key}", in quotes'
                yield Mistake((*keys, str(key)), found, each, True)
            yield from mistakes_of(each, inner, (*keys, str(key)))
    elif not accepts(hint, value):
        yield Mistake(keys, f"is {{value}}; give {described(hint)}", value, True)


def unreal_numbers(config: Any, keys: tuple[str, ...] = ()) -> Iterator[Mistake]:
    """Numbers that no constructor refused but that cannot be computed with: NaN, and integers beyond 64 bits."""
    if isinstance(config, Mapping | list):
        for key, value in config.items() if isinstance(config, Mapping) else enumerate(config):
            yield from unreal_numbers(value, (*keys, str(key)))
    elif isinstance(config, float) and isnan(config):
        yield Mistake(keys, "is {value}; give a number", config)
    elif isinstance(config, int) and abs(config) > MOST:
        yield Mistake(keys, f"is {{value}}; give at most {MOST:,}", config)


def hidden_secrets(config: Any, keys: tuple[str, ...] = ()) -> Iterator[Mistake]:
    """Secrets that are `***`, as the `config.yaml` of a run has them; a server would be sent that."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield from hidden_secrets(value, (*keys, str(key)))
    elif isinstance(config, list):  # perhaps arguments of a command: [--api_key, '***'] or [--api_key=***]
        for place, (before, value) in enumerate(pairwise(["", *config])):
            of = before if isinstance(before, str) and before.startswith("--") and isinstance(value, str) else ""
            if isinstance(value, str) and value.startswith("--") and "=" in value:
                of, _, value = value.partition("=")
            yield from hidden_secrets(value, (*keys, of or str(place)))
    elif config == HIDDEN and any(is_secret(key, config) for key in keys):
        yield Mistake(keys, "is {value}, which is how a run's `config.yaml` hides a secret; give the secret", config)


def accepts(hint: Any, value: Any) -> bool:
    """Whether a value of a config fits a type. The arguments of a class are not checked here; see `mistakes_of`.

    For `int`, `5` and the text `"5"` fit, and `5.0` and `true` do not.
    """
    if isinstance(hint, Group):
        return value is None
    return any(_is(value, choice) for choice in choices(hint))


def described(hint: Any) -> str:
    """A description of valid values: `an integer or null`, `a list, each a text`."""
    if isinstance(hint, Group):
        return "a mapping of keys"
    names = (str,) if chosen_classes(hint) else ()  # a text stands for a class
    wanted = [_described(choice) for choice in choices(hint) if choice not in (NoneType, *names)]
    return " or ".join([*dict.fromkeys(wanted), *(["null"] if NoneType in choices(hint) else [])])


def _is(value: Any, choice: Any) -> bool:
    plain: Any
    plain, parts = get_origin(choice) or choice, get_args(choice)
    if plain is Callable:
        return isinstance(value, str)
    if plain is Literal:
        return any(value == each and type(value) is type(each) for each in parts)
    if not isinstance(plain, type) or plain in (Any, object):
        return True
    if issubclass(plain, str | NoneType):
        return isinstance(value, plain)
    if issubclass(plain, int | float) and isinstance(value, str):
        value = Text(value).value  # a number in quotes is one
    if issubclass(plain, bool):
        return isinstance(value, bool)
    if issubclass(plain, int | float):
        return isinstance(value, int if issubclass(plain, int) else int | float) and not isinstance(value, bool)
    if issubclass(plain, Enum):
        return value in plain.__members__ or isinstance(value, plain)
    if issubclass(plain, PurePath):
        return isinstance(value, str)
    if issubclass(plain, tuple) and parts and Ellipsis not in parts:
        return isinstance(value, list) and len(value) == len(parts) and all(map(accepts, parts, value))
    if issubclass(plain, Mapping):
        return isinstance(value, Mapping) and all(accepts(parts[-1], each) for each in value.values() if parts)
    if issubclass(plain, Sequence | set | frozenset):
        return isinstance(value, list) and all(accepts(parts[0], each) for each in value if parts)
    return isinstance(value, plain) if is_configured(plain) else True


def _described(choice: Any) -> str:
    plain, parts = get_origin(choice) or choice, get_args(choice)
    if plain is Literal:
        return f"one of {', '.join(map(repr, parts))}"
    if not isinstance(plain, type):
        return f"a {plain}"
    scalar = next((name for kind, name in _SCALARS.items() if plain is kind or kind in plain.__mro__[:-1]), None)
    if scalar is not None:
        return scalar
    if issubclass(plain, Enum):
        return f"one of {', '.join(map(repr, plain.__members__))}"
    if issubclass(plain, Mapping):
        return f"a mapping, each value {described(parts[-1])}" if parts and parts[-1] is not Any else "a mapping"
    if issubclass(plain, Sequence | set | frozenset):
        count = f" of {len(parts)}" if issubclass(plain, tuple) and parts and Ellipsis not in parts else ""
        return f"a list{count}, each {described(parts[0])}" if parts and parts[0] is not Any else "a list"
    if is_configured(plain) and is_plain_dataclass(plain):
        return "a mapping of arguments"
    return f"a {plain.__name__}, by its name or as `class_path` and `init_args`"


def _of_arguments(
    tree: Mapping[str, Any], arguments: Mapping[str, Argument], keys: tuple[str, ...]
) -> Iterator[Mistake]:
    for key, value in tree.items():
        if key in arguments:
            yield from mistakes_of(value, arguments[key].hint, (*keys, key))
        else:
            known = ", ".join(sorted(arguments))
            hint = instead_of(str(key), CONFIG_KEYS.get(".".join(keys), {}))
            hint = hint or did_you_mean(str(key), arguments) or (f" Known here: {known}" if known else " It takes none")
            yield Mistake((*keys, str(key)), f"({{value}}) is not a known key.{hint}", value)
    for key, argument in arguments.items():
        if argument.required and key not in tree:
            yield Mistake((*keys, key), "is missing; set it")
        elif isinstance(argument.hint, Group) and key not in tree:
            yield from _of_arguments({}, argument.hint.arguments, (*keys, key))


def _of_class(value: Mapping[str, Any], classes: list[type], keys: tuple[str, ...]) -> Iterator[Mistake]:
    inner = value.get("init_args", {} if "class_path" in value else value)
    if "class_path" not in value:
        first = (next(iter(inner), None),) if isinstance(inner, Mapping) else ()
        found = "({value}) is not a key of its own; write `class_path` with the name of a class, and `init_args`"
        yield Mistake((*keys, *map(str, first)), f"{found}{such_as('', classes)}", inner[first[0]] if first else inner)
        return
    path = value["class_path"]
    if not isinstance(path, str):
        yield Mistake((*keys, "class_path"), "is {value}; give the name or the path of a class", path, True)
        return
    for key in value.keys() - _TO_CHOOSE:
        found = "({value}) is next to `class_path`, and arguments belong under `init_args`; write it there"
        yield Mistake((*keys, str(key)), found, value[key])
    try:
        cls = class_named(path, classes)
    except UserError as error:
        yield Mistake((*keys, "class_path"), str(error), path)
        return
    if isabstract(cls):
        others = f"which is abstract; name a class made of it{such_as(path, classes)}"
        yield Mistake((*keys, "class_path"), f"names the class {path}, {others}", path)
    if isinstance(inner, Mapping):
        yield from _of_arguments(inner, arguments_of(cls), (*keys, "init_args"))
    else:
        yield Mistake((*keys, "init_args"), "is {value}; give a mapping of arguments", inner, True)
