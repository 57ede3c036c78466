"""Merges the layers of a config, which are files and options, into one tree by their types; the last one wins."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, get_args

from rlflow.config.arguments import (
    Argument,
    Group,
    arguments_of,
    chosen_classes,
    entry_hint,
    fields_of,
    implied_class,
    is_choice,
)
from rlflow.config.checking import mistakes_of
from rlflow.config.command_line import Appended, Text
from rlflow.config.keys import ARGUMENTS, CLASS
from rlflow.dag.annotations import choices
from rlflow.errors import UserError
from rlflow.short_names import class_named, path_of

DATA_FILES = (".jsonl", ".json", ".parquet")


def merged(layers: Iterable[Mapping[str, Any]], shape: Group) -> dict[str, Any]:
    """The layers as one tree, in which every class is written as `class_path` and `init_args`.

    The layers `{strategy: fsdp}` and `{strategy: {timeout_s: 5, packing: false}}` give

        {"strategy": {"class_path": "rlflow.strategies.FSDPStrategy", "init_args": {"timeout_s": 5, "packing": False}}}

    and after a third, `{strategy: single}`, the class is `SingleProcess`, which takes `packing` and no `timeout_s`:

        {"strategy": {"class_path": "rlflow.strategies.SingleProcess", "init_args": {"packing": False}}}

    Args:
        layers: Configs and options. A later layer replaces the keys that it names. Where it names another class, those
            arguments stay that the new class takes too.
        shape: The keys that there may be, and their types. Other keys are merged too; `mistakes_of` finds them.
    """
    tree: dict[str, Any] = {}
    for layer in layers:
        tree = _mappings(tree, layer, shape.arguments)
    return tree


def written_whole(value: Any, hint: Any) -> Any:
    """One value, in the form of `merged`: "fsdp" as a strategy is `{"class_path": ..., "init_args": {}}`."""
    return _merged(None, value, hint)


def _merged(old: Any, new: Any, hint: Any) -> Any:
    if isinstance(hint, Group):
        new = _plain(new)
        is_group = new is None or isinstance(new, Mapping)  # a section that nothing stands in is null
        return _mappings(old, new or {}, hint.arguments) if is_group else new
    if isinstance(new, Text):
        is_text = str in choices(hint) and any(mistakes_of(_merged(None, new.value, hint), hint))
        new = new.text if is_text else new.value
    if new is False and any("off" in get_args(choice) for choice in choices(hint)):
        new = "off"  # which YAML reads as false
    if isinstance(new, Appended):
        before = old if isinstance(old, list) else [] if old is None else [old]
        return [*before, *_merged(None, list(new), hint)]
    classes = chosen_classes(hint)
    if isinstance(new, str) and classes:
        new = _named(new, hint, classes)
    if is_choice(hint, new):
        return _class(old, new, classes)
    if isinstance(new, Mapping):
        fields = fields_of(hint, new)
        return _mappings(old, new, dict.fromkeys(new, Argument(entry_hint(hint, dict))) if fields is None else fields)
    if isinstance(new, list):
        return [_merged(None, each, entry_hint(hint, list)) for each in new]
    return new


def _mappings(old: Any, new: Mapping[str, Any], arguments: Mapping[str, Argument]) -> dict[str, Any]:
    found = dict(old) if isinstance(old, Mapping) else {}
    for key, value in new.items():
        found[key] = _merged(found.get(key), value, arguments[key].hint if key in arguments else Any)
    return found


def _named(text: str, hint: Any, classes: Sequence[type]) -> Any:
    """The meaning of a text where a class is chosen: a class's name, the class's only argument, or a plain text."""
    is_path = "." in text and (text.endswith(DATA_FILES) or os.path.exists(text))
    if not is_path or str not in choices(hint):  # else looking for a class of `train.jsonl` would run `train.py`
        with suppress(UserError):
            class_named(text, classes)
            return {CLASS: text}
    cls = implied_class(classes)
    needed = [] if cls is None else [name for name, each in arguments_of(cls).items() if each.required]
    if len(needed) == 1:
        return {ARGUMENTS: {needed[0]: text}}
    return text if str in choices(hint) else {CLASS: text}


def _class(old: Any, new: Mapping[str, Any], classes: list[type]) -> dict[str, Any]:
    """A class and its arguments, merged over those of earlier layers; an unknown class is found by `mistakes_of`."""
    before = _whole(old) if isinstance(old, Mapping) else {}
    new = _whole(new)
    path, cls = new.get(CLASS, before.get(CLASS)), None
    with suppress(UserError):
        cls = implied_class(classes) if path is None else class_named(str(path), classes)
    arguments = {} if cls is None else arguments_of(cls)
    given, inner = before.get(ARGUMENTS, {}), _plain(new.get(ARGUMENTS, {}))
    if cls is not None and path is not None:
        path = path_of(path, classes)
    if cls is not None and path != before.get(CLASS, path):
        given = _kept(given, arguments)
    if cls is not None and path is None:
        path = f"{cls.__module__}.{cls.__qualname__}"
    whole = before | new | ({} if path is None else {CLASS: path})
    return whole | {ARGUMENTS: _mappings(given, inner, arguments) if isinstance(inner, Mapping) else inner}


def _whole(value: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping with `class_path` and `init_args` as keys; a mapping with neither is taken as the arguments."""
    if CLASS not in value and ARGUMENTS not in value:
        return {ARGUMENTS: value}
    return {key: _plain(each) for key, each in value.items()}


def _kept(given: Mapping[str, Any], arguments: Mapping[str, Argument]) -> dict[str, Any]:
    """The arguments of another class that this class takes too, with a fitting type; within a dataclass, its fields."""
    found = {}
    for key, value in given.items():
        if key not in arguments:
            continue
        hint = arguments[key].hint
        if not any(mistakes_of(value, hint)):
            found[key] = value
        elif isinstance(value, Mapping) and (inner := _kept(value, fields_of(hint, value) or {})):
            found[key] = inner
    return found


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Text) else value
