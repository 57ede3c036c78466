"""Builds the objects of a checked config; each object knows its keys, so that its errors can name them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jsonargparse import Namespace

from rlflow.config.arguments import Argument, Group, arguments_of, entry_hint, plain_dataclass
from rlflow.errors import ConfigPlace, UserError, place
from rlflow.short_names import class_named, lacks_library

WrittenAs = Callable[[tuple[str, ...]], str]


def built(value: Any, hint: Any, keys: tuple[str, ...], written: WrittenAs) -> Any:
    """The object that a value of a config describes; parts are built before the object that takes them.

    Args:
        value: The value, as jsonargparse parsed it.
        hint: Type of the value.
        keys: Place of the value in the config with classes written whole: `("strategy", "init_args", "timeout_s")`.
        written: Returns the key for such a place as the user wrote it: `strategy.timeout_s`.

    Raises:
        UserError: A constructor refused its arguments; they are named by their keys.
    """
    if isinstance(hint, Group):
        arguments = hint.arguments
        return {key: built(each, arguments[key].hint, (*keys, key), written) for key, each in _items(value).items()}
    if isinstance(value, Namespace) and "class_path" in value:  # a dict is data, whatever keys it has
        inner = {**_items(value.get("init_args") or {}), **value.get("dict_kwargs", {})}
        return instance(class_named(value["class_path"], (object,)), inner, keys, (*keys, "init_args"), written)
    if isinstance(value, Namespace):
        items = _items(value)
        cls = plain_dataclass(hint, items)
        assert cls is not None, f"{'.'.join(keys)} is of no class"
        return instance(cls, items, keys, keys, written)
    if isinstance(value, list):
        return [built(each, entry_hint(hint, list), (*keys, str(i)), written) for i, each in enumerate(value)]
    if isinstance(value, dict):
        return {key: built(each, entry_hint(hint, dict), (*keys, str(key)), written) for key, each in value.items()}
    return value


def instance(cls: type, items: Any, keys: tuple[str, ...], within: tuple[str, ...], written: WrittenAs) -> Any:
    """Call a class with a config's arguments.

    Args:
        cls: The class.
        items: Arguments of the class, as jsonargparse parsed them.
        keys: Place of the object in the config.
        within: Place of its arguments: `keys`, or `keys` and `init_args`.
        written: Returns the key as the user wrote it, as for `built`.

    Raises:
        UserError: The constructor of the object or of a part refused its arguments, or a library is missing.
    """
    arguments = arguments_of(cls)
    values = {
        key: built(each, arguments.get(key, Argument(Any)).hint, (*within, key), written)
        for key, each in _items(items).items()
    }
    here = ConfigPlace(keys[-1], {name: written((*within, name)) for name in arguments})
    try:
        found = cls(**values)
    except UserError as error:
        raise error.at(here) from error
    except ImportError as error:
        raise lacks_library(written(keys), cls, error) from error
    place(found, here)
    return found


def _items(value: Any) -> dict[str, Any]:
    return dict(value.items(branches=True, nested=False)) if isinstance(value, Namespace) else dict(value)
