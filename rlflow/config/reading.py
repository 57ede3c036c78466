"""YAML of configs and options, with limits on what it may hold, before anything is made of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml
from jsonargparse import set_loader
from yaml.constructor import SafeConstructor

from rlflow.errors import UserError, one_line

MOST_BYTES = 2**18  # of a file
MOST_ENTRIES = 20_000  # of a file, those that aliases repeat counted each time
MOST_DIGITS = 40  # of a number
MOST_LEVELS = 50  # of mappings and lists in one another
MOST_SHOWN = 60  # letters of what a text writes
_TAG = "tag:yaml.org,2002:"
_TAGS: Mapping[type[yaml.Node], tuple[str, ...]] = {
    yaml.ScalarNode: tuple(f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str")),
    yaml.SequenceNode: (f"{_TAG}seq",),
    yaml.MappingNode: (f"{_TAG}map",),
}
_MERGE = f"{_TAG}merge"  # of the key `<<`
_FORMS = {"int": "an integer, such as 3", "float": "a number, such as 0.5", "bool": "true or false"}


class _TooDeep(yaml.MarkedYAMLError):
    """More than `MOST_LEVELS`."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with `1e-5` as a number; dates, `1:30` (90 there) and `010` (8 there) are texts."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._levels = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self._levels == MOST_LEVELS and not self.check_event(yaml.ScalarEvent, yaml.AliasEvent):
            raise _TooDeep(problem_mark=self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        self._levels += 1
        node = super().compose_node(parent, index)
        self._levels -= 1
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


def composed(text: str, what: str) -> yaml.Node:
    """The YAML of a text with its lines; null where there is nothing.

    Args:
        text: With a line end for each line.
        what: The text is, for errors.

    Raises:
        UserError: It is not YAML, a mapping has a key twice, or it is too deep or too large.
    """
    try:
        node = yaml.compose(text, _Loader) or yaml.ScalarNode(f"{_TAG}null", "")
        _check(node, what, {}, (), ())
    except _TooDeep as error:
        line = "" if error.problem_mark is None else f" (line {error.problem_mark.line + 1})"
        raise UserError(f"{what}, which is nested too deeply{line}; give at most {MOST_LEVELS} levels") from error
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        said = ", ".join(part for part in (error.context, error.problem) if part)
        raise UserError(f"{what}, which is not YAML ({' '.join(said.split())}{line}); mend it") from error
    except yaml.YAMLError as error:
        raise UserError(f"{what}, which is not YAML ({one_line(error)}); mend it") from error
    return node


def constructed(node: yaml.Node, what: str) -> Any:
    """The value that a part of a composed text writes.

    Raises:
        UserError: There is none, as of `<<: 3`.
    """
    try:
        return SafeConstructor().construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f" (line {error.problem_mark.line + 1})"
        said = " ".join((error.problem or "").split())
        raise UserError(f"{what}, which holds what a config has not{line}: {said}; write plain YAML") from error


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


def _check(node: yaml.Node, what: str, sizes: dict[int, int], above: tuple[int, ...], keys: tuple[str, ...]) -> int:
    """How many entries a node has, aliases expanded; each node is visited once.

    Args:
        node: A part of the text.
        what: The text is, for errors.
        sizes: Of the nodes visited before, by identity.
        above: The nodes that this one is in.
        keys: Under which it stands.
    """
    if id(node) in sizes:
        return sizes[id(node)]
    line = _line(node)
    if id(node) in above:
        raise UserError(f"{what}, which refers to itself (line {line}); write the value out")
    above = (*above, id(node))
    if node.tag not in _TAGS[type(node)]:
        known = any(node.tag in tags for tags in _TAGS.values())
        found = _written(node) if known else node.tag.replace(_TAG, "!!")
        raise UserError(f"{what}, which holds what a config has not (line {line}): {found}; write plain YAML")
    size = 1
    if isinstance(node, yaml.MappingNode):
        _check_keys(node, what, keys)
        for key, value in node.value:
            name = (*keys, key.value)
            size += 1 if key.tag == _MERGE else _check(key, what, sizes, above, name)
            size += _check(value, what, sizes, above, name)
    elif isinstance(node, yaml.SequenceNode):
        size += sum(_check(part, what, sizes, above, (*keys, str(i))) for i, part in enumerate(node.value))
    elif isinstance(node, yaml.ScalarNode):
        _check_scalar(node, what, keys)
    if size > MOST_ENTRIES:
        of = f" in `{'.'.join(keys)}`" if keys else ""
        raise UserError(
            f"{what}, which holds more than {MOST_ENTRIES:,} entries{of} (line {line}) once its aliases (`*name`) are"
            " expanded; write what is meant"
        )
    sizes[id(node)] = size
    return size


def _check_scalar(node: yaml.ScalarNode, what: str, keys: tuple[str, ...]) -> None:
    of, line, kind = f"`{'.'.join(keys)}`" if keys else "a value", _line(node), node.tag.removeprefix(_TAG)
    if kind in ("int", "float") and len(node.value) > MOST_DIGITS:
        raise UserError(
            f"{what}, which has {of} of {len(node.value):,} digits (line {line}); give {MOST_DIGITS} at most"
        )
    try:
        SafeConstructor().construct_document(node)
    except (ValueError, OverflowError, LookupError) as error:  # of `!!int five`, `!!bool five`
        found = f"in which {of} is `{_written(node)}` (line {line})"
        raise UserError(f"{what}, {found}; give {_FORMS[kind]}") from error


def _check_keys(node: yaml.MappingNode, what: str, keys: tuple[str, ...]) -> None:
    """Refuse keys that stand twice, and those that are nothing, lists or mappings."""
    lines: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        written, line = _written(key), _line(key)
        if not isinstance(key, yaml.ScalarNode) or key.tag == f"{_TAG}null":
            is_name = isinstance(key, yaml.ScalarNode)
            form = f'"{written}", in quotes' if is_name else "a name without brackets, or a text in quotes"
            key_of_it = f"`{'.'.join((*keys, written))}` (line {line})"
            raise UserError(f"{what}, which has the key {key_of_it}, and a key must be text; write {form}")
        if (key.tag, key.value) in lines:
            lines_of_it = f"lines {lines[key.tag, key.value]} and {line}"
            raise UserError(
                f"{what}, which has `{'.'.join((*keys, key.value))}` twice, in {lines_of_it}; leave one out"
            )
        lines[key.tag, key.value] = line


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1 if node.start_mark is not None else 1


def _written(node: yaml.Node) -> str:
    """A part of a text as it stands there, in one line."""
    start, end = node.start_mark, node.end_mark
    text = "" if start is None or start.buffer is None else start.buffer[start.pointer : end.pointer]
    return " ".join(text.split())[:MOST_SHOWN] or "?"
