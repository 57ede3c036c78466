"""What is wrong with a config, in one line: the dotted key as the user wrote it, its value, what to do."""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from rlflow.dag.problems import GraphError
from rlflow.errors import UserError, did_you_mean, one_line
from rlflow.loggers.secrets import HIDDEN, is_secret_key, text_without_secrets, without_secrets

_OUTER_KEY = re.compile(r'^Parser key "([^"]+)":')
_UNKNOWN = re.compile(r"^(?:Group '([^']+)' does not accept option|Option) '([^']+)'")
_UNRECOGNIZED = re.compile(r"^unrecognized arguments: (?:--([\w.-]+)|(\S+))(?:[= ](.*))?")
_REQUIRED = re.compile(r"^the following arguments are required: ([^,\s]+)")
_TYPE = re.compile(r"Expected a (?:<class '([\w.]+)'>|(?!dot import)(\S.*))\. Got value: (.*)")
_UNION = re.compile(r"Errors:(.*)Given value type: .*Given value: (.*)", re.S)
_NO_CLASS = re.compile(
    r"Problem with given class_path '([^']+)':\s*(.*)|Expected a dot import path string: (\S+)", re.S
)
_CHOICE = re.compile(r"Expected a typing\.Literal\[(.*)\]\s+- Expected a dot import path string: (.*)")
_IN_CHOICE = re.compile(r"Expected a typing\.Literal\[.*- `([\w.]+)` (.*?)\s+Given value type", re.S)
_WRONG_CLASS = re.compile(r"Import path (\S+) does not correspond to a subclass of (\w+)")
_NO_MODULE = re.compile(r"No module named '([^']+)'")
_WITH_CLASSES = (
    "rlflow.algorithms",
    "rlflow.callbacks",
    "rlflow.data",
    "rlflow.loggers",
    "rlflow.rewards",
    "rlflow.rollout",
    "rlflow.strategies",
)
_TYPES = {
    "int": "an integer",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "list": "a list",
    "dict": "a mapping",
}


class ConfigError(UserError):
    """A mistake in a config, told by its place in what the user wrote once that is known (`told_of`).

    Args:
        keys: The wrong key; before it, as far as they are known, the keys that it stands under.
        found: What is wrong with it; `{value}` stands for the value.
        value: The value, where what the user wrote does not tell.
    """

    def __init__(self, keys: Sequence[str], found: str, value: Any = None) -> None:
        self.keys = tuple(keys)
        self.found = found
        self.value = value
        key = f"`{'.'.join(keys)}` " if keys else ""
        secret = value is not None and any(map(is_secret_key, keys))
        shown = HIDDEN if secret else _shown(without_secrets(value))
        super().__init__(text_without_secrets(f"{key}{found.replace('{value}', shown)}"))

    def under(self, key: str) -> ConfigError:
        """The same mistake, which stands under `key`."""
        return ConfigError((*key.split("."), *self.keys), self.found, self.value)

    def told_of(self, given: Mapping[str, Any]) -> ConfigError:
        """The same mistake by its place.

        Args:
            given: The config as the user wrote it, files and options merged.
        """
        path = _place(self.keys, given)
        value = _at(path, given)
        return ConfigError(path, self.found, self.value if value is None else value)


def complaint(error: BaseException | str, parser: ArgumentParser) -> UserError:
    """What is wrong with a config.

    Args:
        error: jsonargparse's, or its text. A `UserError` that a constructor raised within it is taken as it is.
        parser: Whose keys are legal: the command's, or of a class within it.
    """
    message = str(error).strip()
    outer = _OUTER_KEY.match(message)
    cause = next((cause for cause in _causes(error) if isinstance(cause, UserError)), None)
    if isinstance(cause, ConfigError) and outer is not None:
        return cause.under(outer.group(1))
    if cause is not None:
        return cause
    keys = outer.group(1).split(".") if outer is not None else []
    said = _OUTER_KEY.sub("", message)
    return _unknown(message, parser) or _wrong_value(said, keys) or ConfigError(keys, one_line(ValueError(said)))


def written(arguments: Sequence[str]) -> dict[str, Any]:
    """The config as the arguments give it, unchecked: YAML files and dotted options merged, the later one wins."""
    given: dict[str, Any] = {}
    for name, value in options(arguments):
        if name == "config":
            _merge(given, config_file(value))
        else:
            tree = _loaded(value)
            for key in reversed(name.split(".")):
                tree = {key: tree}
            _merge(given, tree)
    return given


def options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The options and their values, in order: `--trainer.max_steps 3` and `--trainer.max_steps=3` alike."""
    rest = list(arguments)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("--"):
            continue
        if not equals and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        yield name[2:], value


def config_file(path: str) -> Any:
    """What a config holds, unchecked.

    Raises:
        UserError: It is not there, is not YAML, or holds no keys.
    """
    if not Path(path).is_file():
        raise UserError(f"`--config` is {path!r}, and there is no such file in {Path.cwd()}; check the path")
    try:
        tree = yaml.safe_load(Path(path).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"`--config` is {path!r}, which is not YAML ({one_line(error)}); mend it") from error
    if tree is not None and not isinstance(tree, Mapping):
        raise UserError(f"`--config` is {path!r}, which holds no `key: value` lines but {_shown(tree)}; mend it")
    return tree


@contextmanager
def naming_keys(config: Mapping[str, Any]) -> Iterator[None]:
    """A `UserError` raised within names an argument by its place in `config`: its constructor knows the name alone."""
    try:
        yield
    except GraphError:
        raise  # its names are nodes
    except UserError as error:
        raise UserError(_with_places(str(error), config)) from error


def _unknown(message: str, parser: ArgumentParser) -> ConfigError | None:
    """A key or option that there is none of."""
    if match := _UNKNOWN.match(message):
        group, key = match.groups()
        return _no_key([*(group or "").split("."), key] if group else key.split("."), parser)
    if match := _UNRECOGNIZED.match(message):
        option, stray, value = match.groups()
        if option is None:
            return ConfigError((), f"`{stray}` is neither an option nor a value of one; an option is `--key value`")
        return _no_key(option.split("."), parser, value)
    if match := _REQUIRED.match(message):
        return ConfigError(match.group(1).split("."), "is missing; set it")
    return None


def _no_key(keys: Sequence[str], parser: ArgumentParser, value: str | None = None) -> ConfigError:
    group = "".join(f"{key}." for key in keys[:-1])
    legal = [action.dest for action in parser._actions if action.option_strings or action.required]
    here = sorted({dest.removeprefix(group).split(".")[0] for dest in legal if dest.startswith(group)} - {"help"})
    if not here:
        found = "({value}) is no key of its own; write `class_path: module.Class` and arguments under `init_args`"
        return ConfigError(keys, found, value)
    hint = did_you_mean(keys[-1], here) or f" Known here: {', '.join(here)}"
    return ConfigError(keys, f"({{value}}) is no known key.{hint}", value)


def _wrong_value(message: str, keys: Sequence[str]) -> ConfigError | None:
    if match := _CHOICE.search(message):
        choices, value = match.groups()
        return ConfigError(keys, f"is {{value}}; give one of {choices}, or a mapping of arguments", value)
    if match := _IN_CHOICE.search(message):
        key, complaint = match.groups()
        return ConfigError(key.split(".") if key.startswith(".".join(keys)) else [*keys, key], complaint)
    if match := _NO_CLASS.search(message):
        path, why, name = match.groups()
        return ConfigError(keys, _no_class(path, why) if path else _no_path(name))
    if match := _WRONG_CLASS.search(message):
        return ConfigError(keys, f"names the class {match.group(1)}, which is no {match.group(2)}; name one that is")
    if match := _UNION.search(message):
        types, value = match.groups()
        wanted = [_TYPES.get(name, f"a {name}") for name in re.findall(r"Expected a <class '([\w.]+)'>", types)]
        if "NoneType" in types and wanted:
            wanted = [*(each for each in wanted if each != "a NoneType"), "null"]
            return ConfigError(keys, f"is {{value}}; give {' or '.join(wanted)}", value)
    if match := _TYPE.search(message):
        plain, special, value = match.groups()
        kind = _TYPES.get(plain or "", f"a {plain or special}").replace("typing.", "")
        if kind.startswith("a Literal["):
            kind = f"one of {kind[len('a Literal[') : -1]}"
        return ConfigError(keys, f"is {{value}}; give {kind}", value)
    return None


def _no_class(path: str, why: str) -> str:
    """There is no class of that path."""
    module, _, name = path.rpartition(".")
    absent = _NO_MODULE.search(why)
    if absent and (module == absent.group(1) or module.startswith(f"{absent.group(1)}.")):
        hint = did_you_mean(module, _importable())
        return f"names the class {path}, but there is no module {absent.group(1)}.{hint or ' Check the path'}"
    if "has no attribute" in why:
        hint = did_you_mean(name, dir(importlib.import_module(module)))
        return f"names the class {path}, but {module} has no {name}.{hint or ' Check the path'}"
    reason = " ".join(why.split("\n  Given value type:")[0].split())
    return f"names the class {path}, which cannot be imported ({reason}); mend its module"


def _no_path(name: str) -> str:
    """A class without its module is none of rlflow's."""
    known = {name for module in _WITH_CLASSES for name in dir(importlib.import_module(module))}
    hint = did_you_mean(name, known) or f" Write `module.{name}`"
    return f"names the class {name}, which is not known without its module.{hint}"


def _importable() -> list[str]:
    """Modules that a config's classes may lie in: rlflow's, and the user's own beside the config."""
    return [*_WITH_CLASSES, *(file.stem for file in Path.cwd().glob("*.py"))]


def _with_places(message: str, config: Mapping[str, Any]) -> str:
    def placed(match: re.Match[str]) -> str:
        name = match.group(1)
        if name in (config.get("placement") or {}):
            return match.group(0)  # a role
        places = [path for path in _paths(config) if ".".join(path).endswith(f".{name}")]
        if name in config or len(places) != 1:
            fitting = [path for path in places if _shown(_at(path, config)) in message] if name not in config else []
            places = fitting if len(fitting) == 1 else []
        return f"`{'.'.join(places[0])}`" if places else match.group(0)

    return re.sub(r"(?<!column )`([a-z_][\w.]*)`", placed, message)


def _causes(error: BaseException | str) -> Iterator[BaseException]:
    """The error, and what it was raised from or while handling."""
    seen: list[BaseException] = []
    while isinstance(error, BaseException) and not any(error is earlier for earlier in seen):
        seen.append(error)
        yield error
        following = error.__cause__ or error.__context__
        if following is None:
            return
        error = following


def _place(keys: Sequence[str], given: Mapping[str, Any]) -> tuple[str, ...]:
    """Where `keys` stand in `given`, other keys in between; if they do not, below the longest part that does."""
    for known in range(len(keys), 0, -1):
        found = [path for path in _paths(given) if path[-1] == keys[known - 1] and _within(keys[:known], path)]
        if found:
            owner = _at(found[-1], given)
            under_class = known < len(keys) and isinstance(owner, Mapping) and "class_path" in owner
            return (*found[-1], *(["init_args"] if under_class else []), *keys[known:])
    return tuple(keys)


def _within(keys: Sequence[str], path: Sequence[str]) -> bool:
    steps = iter(path)
    return all(key in steps for key in keys)


def _paths(tree: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    entries = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in entries:
        path = (*above, str(key))
        yield path
        yield from _paths(value, path)


def _at(path: Collection[str], tree: Any) -> Any:
    for key in path:
        if isinstance(tree, Mapping):
            tree = tree.get(key)
        elif isinstance(tree, list) and key.isdigit() and int(key) < len(tree):
            tree = tree[int(key)]
        else:
            return None
    return tree


def _merge(into: dict[str, Any], tree: Any) -> None:
    for key, value in tree.items() if isinstance(tree, Mapping) else ():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into.pop(key, None)  # the later one comes last
            into[key] = value


def _loaded(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _shown(value: Any) -> str:
    return "null" if value is None else f"{value!r:.80}"
