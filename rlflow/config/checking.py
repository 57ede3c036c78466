"""What is wrong with a config: found by the types of what it configures, with the key, the value and what to give."""

from __future__ import annotations

from argparse import ArgumentError
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from inspect import isabstract
from math import isnan
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from jsonargparse import ArgumentParser

from rlflow.config.arguments import (
    Argument,
    Group,
    arguments_of,
    chosen_classes,
    fields_of,
    implied_class,
    is_choice,
    is_configured,
)
from rlflow.config.classes import class_named, such_as
from rlflow.config.describing import class_example, described, example_of_one
from rlflow.config.reading import read
from rlflow.dag.annotations import choices
from rlflow.errors import UserError, did_you_mean

MOST = 2**63 - 1
_NUMBERS = (int, float, bool)
_TO_CHOOSE = {"class_path", "init_args", "dict_kwargs"}


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong.

    Attributes:
        keys: Where, in the tree in which classes are written whole.
        found: What is wrong there; `{value}` stands for the value.
        value: What stands there.
        of_type: Whether it is no value of its type, which holds whatever else a class takes.
    """

    keys: tuple[str, ...]
    found: str
    value: Any = None
    of_type: bool = False

    def of_option(self) -> Mistake:
        """The same, in an option of a command without a config."""
        return replace(self, keys=(f"--{self.keys[0]}", *self.keys[1:]))


def mistakes(tree: Mapping[str, Any], shape: Group) -> Iterator[Mistake]:
    """All that is wrong with a merged config, in its order; what is missing last."""
    yield from _of_arguments(tree, shape.arguments, ())


def mistakes_of(value: Any, hint: Any, keys: tuple[str, ...], default: Any = None) -> Iterator[Mistake]:
    """All that is wrong with a value of a type; a default is told as an example of it."""
    if isinstance(hint, Group):
        if isinstance(value, Mapping):
            yield from _of_arguments(value, hint.arguments, keys)
        elif value is not None:
            form = f"a mapping of keys, such as `{example_of_one(hint.arguments)}`"
            yield Mistake(keys, f"is {{value}}; give {form}", value, True)
        return
    if is_choice(hint, value) and (not _is_mapping_of(hint) or "class_path" in value):
        yield from _of_class(value, chosen_classes(hint), keys)
        return
    fields = fields_of(hint, value) if isinstance(value, Mapping) else None
    if fields is not None:
        yield from _of_arguments(value, fields, keys)
        return
    entries = _entries(value, hint)
    if entries is not None:
        for key, each in entries:
            if isinstance(value, Mapping) and not isinstance(key, str) and _is_mapping_of(hint, str):
                found = f'({{value}}) has the key {key}, and a key must be text; write "{key}", in quotes'
                yield Mistake((*keys, str(key)), found, each, True)
            yield from mistakes_of(each, _entry_hint(hint, value), (*keys, str(key)))
    elif not accepts(hint, value):
        yield Mistake(keys, f"is {{value}}; give {described(hint, default)}", value, True)


def unreal_numbers(config: Any, keys: tuple[str, ...] = ()) -> Iterator[Mistake]:
    """What no constructor minded and no computer counts with: NaN, and whole numbers beyond 64 bits."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield from unreal_numbers(value, (*keys, str(key)))
    elif isinstance(config, list):
        for number, value in enumerate(config):
            yield from unreal_numbers(value, (*keys, str(number)))
    elif isinstance(config, float) and isnan(config):
        yield Mistake(keys, "is {value}; give a number", config)
    elif isinstance(config, int) and abs(config) > MOST:
        yield Mistake(keys, f"is {{value}}; give at most {MOST:,}", config)


def accepts(hint: Any, value: Any) -> bool:
    """Whether a value is one of a type, as jsonargparse reads values."""
    others = [choice for choice in choices(hint) if choice is not NoneType]
    if value is None or Any in others:
        return NoneType in choices(hint) or not {Any, object}.isdisjoint(others)
    if isinstance(value, str) and all(choice in _NUMBERS or get_origin(choice) is Literal for choice in others):
        value = _number(value, others)
        if isinstance(value, str):
            return any(value in get_args(choice) for choice in others)
    if isinstance(value, list) and str not in others and any("*" in each for each in value if isinstance(each, str)):
        return False  # jsonargparse would expand its aliases
    if not isinstance(value, str | Mapping) and all(isinstance(each, type) and is_configured(each) for each in others):
        return isinstance(value, tuple(others))  # of what a config writes as a mapping, or as the path of a class
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_argument("--value", type=hint)
    except ValueError:  # it knows no values of such a type
        return True
    try:
        parser.parse_object({"value": value})
    except (ArgumentError, TypeError, ValueError):
        return False
    return True


def _number(text: str, choices_of_it: list[Any]) -> Any:
    if any(text in get_args(choice) for choice in choices_of_it):
        return text
    try:
        return read(text)
    except UserError:
        return text


def _of_arguments(
    tree: Mapping[str, Any], arguments: Mapping[str, Argument], keys: tuple[str, ...]
) -> Iterator[Mistake]:
    for key, value in tree.items():
        if key in arguments:
            yield from mistakes_of(value, arguments[key].hint, (*keys, key), arguments[key].default)
        else:
            known = ", ".join(sorted(arguments))
            hint = did_you_mean(str(key), arguments) or (f" Known here: {known}" if known else " It takes none")
            yield Mistake((*keys, str(key)), f"({{value}}) is no known key.{hint}", value)
    for key, argument in arguments.items():
        below = argument.hint if isinstance(argument.hint, Group) else None
        if argument.required and key not in tree:
            yield Mistake((*keys, key), "is missing; set it")
        elif below is not None and key not in tree:
            yield from _of_arguments({}, below.arguments, (*keys, key))


def _of_class(value: Mapping[str, Any], classes: list[type], keys: tuple[str, ...]) -> Iterator[Mistake]:
    if "class_path" not in value:
        yield from _of_implied_class(value, classes, keys)
        return
    path, inner = value["class_path"], value.get("init_args", {})
    if not isinstance(path, str):
        yield Mistake((*keys, "class_path"), "is {value}; give the path of a class, module.Class", path, True)
        return
    for key in value.keys() - _TO_CHOOSE:
        found = "({value}) stands beside `class_path`, and arguments stand under `init_args`; write it there"
        yield Mistake((*keys, str(key)), found, value[key])
    try:
        cls = class_named(path, classes)
    except UserError as error:
        yield Mistake((*keys, "class_path"), str(error), path)
        return
    if isabstract(cls):
        others = f"which others are made of; name one of those{such_as(path, classes)}"
        yield Mistake((*keys, "class_path"), f"names the class {path}, {others}", path)
    if isinstance(inner, Mapping):
        yield from _of_arguments(inner, arguments_of(cls), (*keys, "init_args"))
    else:
        yield Mistake((*keys, "init_args"), "is {value}; give a mapping of arguments", inner, True)


def _of_implied_class(value: Mapping[str, Any], classes: list[type], keys: tuple[str, ...]) -> Iterator[Mistake]:
    cls = implied_class(classes)
    inner = value.get("init_args", value)
    within = (*keys, "init_args") if "init_args" in value else keys
    if cls is not None and isinstance(inner, Mapping):
        yield from _of_arguments(inner, arguments_of(cls), within)
        return
    first = next(iter(inner), None) if isinstance(inner, Mapping) else None
    example, _ = class_example(classes)
    near = f", such as {example}," if example else ""
    found = f"({{value}}) is no key of its own; write `class_path: module.Class`{near} and arguments under `init_args`"
    yield Mistake(within if first is None else (*within, str(first)), found, inner if first is None else inner[first])


def _is_mapping_of(hint: Any, keys: type | None = None) -> bool:
    """Whether one of its types is a mapping, whose keys are of this type if one is given."""
    mappings = [choice for choice in choices(hint) if get_origin(choice) is dict or choice is dict]
    return bool(mappings) and (keys is None or all(get_args(each)[:1] == (keys,) for each in mappings))


def _entries(value: Any, hint: Any) -> list[tuple[Any, Any]] | None:
    """The entries of a list or a mapping that is one by its type."""
    origins = {get_origin(choice) for choice in choices(hint) if get_args(choice)}
    if isinstance(value, list) and list in origins:
        return list(enumerate(value))
    if isinstance(value, Mapping) and dict in origins:
        return list(value.items())
    return None


def _entry_hint(hint: Any, value: Any) -> Any:
    wanted = list if isinstance(value, list) else dict
    found = (get_args(choice)[-1] for choice in choices(hint) if get_origin(choice) is wanted)
    return next(found, Any)
