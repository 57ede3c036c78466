"""YAML of configs and options: its values, with the line of what is wrong."""

from __future__ import annotations

import re
from typing import Any

import yaml
from jsonargparse import set_loader
from yaml.constructor import SafeConstructor

from rlflow.errors import UserError, one_line

_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with `1e-5` as a number; dates, `1:30` (90 there) and `010` (8 there) are texts."""


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


def composed(text: str, what: str) -> yaml.Node:
    """The YAML of a text with its lines; null where there is nothing.

    Args:
        text: With a line end for each line.
        what: The text is, for errors.

    Raises:
        UserError: It is not YAML, or a mapping has a key twice.
    """
    try:
        node = yaml.compose(text, _Loader) or yaml.ScalarNode(f"{_TAG}null", "")
        _refuse_doubles(node, what, (), set())
    except yaml.YAMLError as error:
        raise UserError(f"{what}, which is not YAML ({_said(error)}); mend it") from error
    except RecursionError as error:
        raise UserError(f"{what}, which is nested too deeply; mend it") from error
    return node


def constructed(node: yaml.Node, what: str) -> Any:
    """The value that a part of a composed text writes.

    Raises:
        UserError: There is none, as of `<<: 3`, `!!int five` or a tag of one's own.
    """
    try:
        return SafeConstructor().construct_document(node)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
        raise UserError(f"{what}, which holds what a config has not ({_said(error)}); write plain YAML") from error


def read(text: str, what: str = "a text") -> Any:
    """The value of a text.

    Raises:
        UserError: As `composed` and `constructed`.
    """
    return constructed(composed(text, what), what)


def _read_again(text: str) -> Any:
    """As jsonargparse asks for it of texts that may stand for numbers, lists or mappings; `{name}` stays a text."""
    value = read(text)
    return text if isinstance(value, dict) and not any(each is not None for each in value.values()) else value


set_loader("yaml", _read_again, exceptions=(UserError,))


def _refuse_doubles(node: yaml.Node, what: str, keys: tuple[str, ...], seen: set[int]) -> None:
    """Refuse keys that stand twice in a mapping; a part that an alias repeats is visited once."""
    if id(node) in seen or isinstance(node, yaml.ScalarNode):
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for number, part in enumerate(node.value):
            _refuse_doubles(part, what, (*keys, str(number)), seen)
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in lines:
            of_it = f"`{'.'.join((*keys, name))}` twice, in lines {lines[name]} and {line}"
            raise UserError(f"{what}, which has {of_it}; leave one out")
        lines[name] = line
        _refuse_doubles(value, what, (*keys, name), seen)


def _said(error: Exception) -> str:
    """What YAML says of an error, with the line."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return one_line(error)
    line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
    return " ".join(f"{', '.join(filter(None, (error.context, error.problem)))}{line}".split())
