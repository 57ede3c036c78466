"""What to give for a setting, by its type: in words, and an example."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from rlflow.config.arguments import Argument, chosen_classes, fields_of
from rlflow.dag.annotations import choices
from rlflow.dotted_path import object_at

_NAMES = {
    int: "an integer",
    float: "a number",
    str: "a text",
    bool: "true or false",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
    Sequence: "a list",
    Mapping: "a mapping",
}
_CONTAINERS = {list: "of", Sequence: "of", dict: "of names to", Mapping: "of names to"}
_SCALARS = {bool: "true", int: "1", float: "0.5", str: "text"}
EXAMPLES = {  # of the classes that a config chooses from: one, and the arguments without which it is not
    "rlflow.algorithms.GRPO": "actor: {model: tiny}",
    "rlflow.CausalLM": "model: tiny",
    "rlflow.RewardModel": "model: tiny",
    "rlflow.ValueModel": "model: tiny",
    "rlflow.callbacks.EarlyStopping": "monitor: val/reward, patience: 3",
    "rlflow.data.JSONL": "path: rows.jsonl",
    "rlflow.loggers.JSONLLogger": "",
    "rlflow.rewards.ExactMatch": "",
    "rlflow.rollout.TransformersEngine": "",
    "rlflow.strategies.SingleProcess": "",
}


def described(hint: Any, default: Any = None) -> str:
    """What to give: `an integer or null`; of a list, a mapping or a class with an example.

    Args:
        hint: The type.
        default: Of that type, which is the example if it shows the form.
    """
    wanted = []
    for choice in choices(hint):
        if get_origin(choice) is Literal:
            wanted.append(f"one of {', '.join(map(repr, get_args(choice)))}")
        elif choice is not NoneType:
            wanted.append(_name(choice))
    if fields_of(hint, {}) is not None:
        wanted = [each for each in wanted if each.startswith(("one of", *_NAMES.values()))]
        wanted.append("a mapping of arguments")
    if len(wanted) == 2 and wanted[0].startswith("one of"):
        wanted[0] += ","
    null = ["null"] if NoneType in choices(hint) else []
    return " or ".join([*wanted, *null]) + _such_as(hint, default)


def example_of_one(arguments: Mapping[str, Argument]) -> str:
    """One of the arguments as YAML: the first that is required, else the first whose default shows its form."""
    of_each = {name: _example(each.hint, each.default) for name, each in arguments.items()}
    required = (name for name, each in arguments.items() if each.required)
    shown = (name for name, each in arguments.items() if _of_value(each.default))
    name = next(required, next(shown, next(iter(arguments), "")))
    return f"{{{name}: {of_each[name]}}}" if of_each.get(name) else "{}"


def class_example(classes: Sequence[type]) -> tuple[str, str]:
    """A class of these by its path and the arguments that it needs, as YAML; empty where there is none."""
    for path, arguments in EXAMPLES.items():
        if issubclass(object_at(path, path), tuple(classes)):
            return path, arguments
    return "", ""


def _such_as(hint: Any, default: Any) -> str:
    others = [choice for choice in choices(hint) if choice is not NoneType]
    if all(choice in _SCALARS or get_origin(choice) is Literal for choice in others):
        return ""
    classes = chosen_classes(hint)
    path, arguments = class_example(classes) if classes else ("", "")
    if path:
        return f", such as `class_path: {path}`" + (f" and `init_args: {{{arguments}}}`" if arguments else "")
    found = _example(hint, default)
    return f", such as `{found}`" if found else ""


def _example(hint: Any, default: Any = None) -> str:
    """A value of a type as YAML in one line; empty where none is known."""
    if default is not None and (found := _of_value(default)):
        return found
    if classes := chosen_classes(hint):
        path, arguments = class_example(classes)
        if path:
            return f"{{class_path: {path}{f', init_args: {{{arguments}}}' if arguments else ''}}}"
    if (fields := fields_of(hint, {})) is not None:
        return example_of_one(fields)
    return next(filter(None, map(_of_choice, choices(hint))), "")


def _of_choice(choice: Any) -> str:
    plain, parts = get_origin(choice) or choice, get_args(choice)
    if plain is Literal:
        return str(parts[0])
    if plain in (list, tuple, Sequence) and parts:
        count = len(parts) if plain is tuple and Ellipsis not in parts else 1
        return _listed(_example(each) for each in parts[:count])
    if plain in (dict, Mapping) and parts:
        found = _example(parts[1])
        return f"{{name: {found}}}" if found else ""
    return _SCALARS.get(plain, "")


def _of_value(value: Any) -> str:
    """A default as YAML; empty where it is of no form that is plain, or has nothing in it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float | str):
        return str(value)
    return _listed(map(_of_value, value)) if isinstance(value, list | tuple) else ""


def _listed(parts: Iterable[str]) -> str:
    found = list(parts)
    return f"[{', '.join(found)}]" if found and all(found) else ""


def _name(hint: Any) -> str:
    plain, parts = get_origin(hint) or hint, get_args(hint)
    name = _NAMES.get(plain, f"a {getattr(plain, '__name__', str(plain))}")
    if plain is tuple and Ellipsis not in parts:
        same = f" {_plural(parts[0])}" if len(set(parts)) == 1 and _plural(parts[0]) else ""
        return f"a list of {len(parts)}{same}" if parts else name
    many = _plural(parts[-1]) if parts and plain in _CONTAINERS else ""
    return f"{name} {_CONTAINERS[plain]} {many}" if many else name


def _plural(hint: Any) -> str:
    """Of a type: `numbers`, `Loggers`; empty where it is of more than two, or any."""
    found = []
    for choice in choices(hint):
        plain = get_origin(choice) or choice
        if plain in _NAMES and plain is not bool:
            found.append(f"{_NAMES[plain].partition(' ')[2]}s")
        elif isinstance(plain, type) and plain not in (Any, bool, object, NoneType):
            found.append(f"{plain.__name__}s")
        else:
            return ""
    return " or ".join(found) if len(found) < 3 else ""
