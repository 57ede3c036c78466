"""Reads a command line: each config file and each option becomes a layer, a tree of keys to values."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from jsonargparse import set_dumper, set_loader

from rlflow.errors import UserError, no_file, one_line
from rlflow.loggers.secrets import arguments_without_secrets, without_secrets

CONFIG = "config"
_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class Text:
    """The value of an option: its text, or the text read as YAML, whichever fits the option's type.

    Example:
        `Text("1e-5").value` is a number and `Text("[0, 1]").value` a list; a setting that takes texts gets `1e-5`.

    Attributes:
        text: The value as it is on the command line.
    """

    text: str

    @cached_property
    def value(self) -> Any:
        """The text read as YAML; the text itself if it is not YAML."""
        try:
            return read(self.text)
        except UserError:
            return self.text


class Appended(list[Any]):
    """Entries that an option adds to a list, `--callbacks+ NAME`, in place of replacing the list."""


def layers(arguments: Sequence[str], alone: Mapping[str, Any] = MappingProxyType({})) -> list[dict[str, Any]]:
    """The configs and options of a command line, in order, each a tree; values of options are `Text`.

    Example:
        `["--config", "my.yaml", "--trainer.max_steps", "9"]` gives the tree of `my.yaml` and then
        `{"trainer": {"max_steps": Text("9")}}`.

    Args:
        arguments: `--key value` and `--key=value`; `--config FILE` for a config.
        alone: Options that may be given without a value, and the value that they have then.

    Raises:
        UserError: An argument is not an option, lacks its value, or a config cannot be read.
    """
    found = []
    for name, text in options(arguments):
        if text is None and name not in alone:
            raise UserError(f"`--{name}` has no value; write `--{name} VALUE`")
        if name == CONFIG:
            found.append(_file(text or ""))
            continue
        value: Any = alone[name] if text is None else Text(text)
        if name.endswith("+"):
            value = Appended([value])
        for key in reversed(name.removesuffix("+").split(".")):
            value = {key: value}
        found.append(value)
    return found


def options(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Names of options and their values, `--a.b 3` and `--a.b=3` alike; None for an option without a value.

    Raises:
        UserError: An argument is neither an option nor follows one.
    """
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--") or argument == "--":
            given = f"{arguments_without_secrets([argument])[0]:.80}"
            raise UserError(f"`{given}` is neither an option nor a value of one; an option is `--key value`")
        name, equals, value = argument[2:].partition("=")
        if equals:
            yield name, value
        else:
            yield name, rest.pop(0) if rest and not rest[0].startswith("--") else None


def _file(path: str) -> dict[str, Any]:
    """The tree of a config.

    Raises:
        UserError: It cannot be read, is not YAML, or holds no keys.
    """
    what = f"`--{CONFIG}` is {path!r:.200}"
    if not os.path.isfile(path):
        raise UserError(f"{what}{no_file(path, 'a YAML file', '.yaml', '.yml')}")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{what}, which is not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except OSError as error:
        raise UserError(f"{what}, which cannot be read ({one_line(error)}); check the path") from error
    tree = read(text, what)
    if tree is not None and not isinstance(tree, dict):
        raise UserError(f"{what}, which holds no `key: value` lines but {without_secrets(tree)!r:.80}; correct it")
    return tree or {}


class _Loader(yaml.SafeLoader):
    """YAML 1.1, except that `1e-5` is a number, and dates, `1:30` and `010` are texts (90 and 8 in YAML 1.1).

    A key that a mapping has twice is an error.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._keys: list[str] = []  # of the node that is composed, from the root, which has none

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a part of `parent`: what is at a place of a list, or under the node of a key."""
        self._keys.append(str(getattr(index, "value", index)))
        node: yaml.Node | None = super().compose_node(parent, index)
        self._keys.pop()
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                full = ".".join((*self._keys[1:], name))
                raise yaml.YAMLError(f"it has `{full}` twice, in lines {lines[name]} and {line}")
            lines[name] = line
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("timestamp", "int", "float")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    f"{_TAG}int", re.compile(r"[-+]?(0b[01_]+|0x[\da-fA-F_]+|0|[1-9][\d_]*)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    f"{_TAG}float",
    re.compile(r"[-+]?((\d[\d_]*\.\d*|\.\d+)([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.(inf|Inf|INF))$|\.(nan|NaN|NAN)$"),
    list("-+.0123456789"),
)


def read(text: str, what: str = "a text") -> Any:
    """The value of a YAML text; None for an empty one.

    Args:
        text: The YAML, of one or more lines.
        what: Beginning of an error's sentence: "`--config` is 'my.yaml'", which continues ", which is not plain YAML".

    Raises:
        UserError: It is not YAML, has a key twice, or holds a tag or value that a config cannot have: `!!int five`.
    """
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except RecursionError as error:
        raise UserError(f"{what}, which is nested too deeply; correct it") from error
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
        raise UserError(f"{what}, which is not plain YAML ({_message_of(error)}); correct it") from error


class _Dumper(yaml.SafeDumper):
    """Writes texts in quotes that would be read as something else: by `_Loader`, or by YAML 1.1."""


_Dumper.yaml_implicit_resolvers = {
    first: [*_Loader.yaml_implicit_resolvers.get(first, ()), *yaml.SafeDumper.yaml_implicit_resolvers.get(first, ())]
    for first in {*_Loader.yaml_implicit_resolvers, *yaml.SafeDumper.yaml_implicit_resolvers}
}


def as_yaml(config: Mapping[str, Any]) -> str:
    """A config as YAML, which `read` reads as the same."""
    text: str = yaml.dump(dict(config), Dumper=_Dumper, sort_keys=False)
    return text


def _read_again(text: str) -> Any:
    """The loader for jsonargparse: a text's value as YAML, but `{name}`, a mapping without values, stays a text."""
    value = read(text)
    return text if isinstance(value, dict) and not any(each is not None for each in value.values()) else value


set_loader("yaml", _read_again, exceptions=(UserError,))
# for `--print_config`
set_dumper("yaml", lambda config: yaml.dump(config, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def _message_of(error: Exception) -> str:
    """The message of a YAML error in one line, with the line's number."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return one_line(error)
    line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
    return " ".join(f"{', '.join(filter(None, (error.context, error.problem)))}{line}".split())
