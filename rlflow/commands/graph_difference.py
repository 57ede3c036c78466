"""What differs between two algorithms: their nodes, the other methods that these call, and their settings."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType
from typing import Any

from rlflow.commands.graph_drawing import TYPES, returned
from rlflow.dag.graph import Graph
from rlflow.dag.node import Node, place

NONE = "no difference"


@dataclass(frozen=True)
class Algorithm:
    """One of the two.

    Attributes:
        module: The instance that the graph was read from.
        graph: Its graph.
        settings: Its settings that count, by name.
    """

    module: object
    graph: Graph
    settings: Mapping[str, Any]

    @property
    def title(self) -> str:
        """The class, and where it is written."""
        cls = type(self.module)
        return f"{cls.__name__}  {place(inspect.getfile(cls), inspect.getsourcelines(cls)[1])}"

    @cached_property
    def methods(self) -> dict[str, str]:
        """Where each method that is no node is written, by name; special ones and removed nodes are left out."""
        found = {}
        removed = {name for name, value in vars(self.module).items() if value is None}
        names = dict.fromkeys(name for cls in reversed(type(self.module).__mro__) for name in vars(cls))
        for name in names.keys() - removed:
            value = inspect.getattr_static(type(self.module), name)
            function = value.fget if isinstance(value, property) else value
            if isinstance(function, FunctionType) and not name.startswith("__") and name not in self.graph.nodes:
                code = inspect.unwrap(function).__code__
                found[name] = place(code.co_filename, code.co_firstlineno)
        return {name: found[name] for name in names if name in found}


def difference(left: Algorithm, right: Algorithm) -> str:
    """What is only in `left` (-), only in `right` (+), or in both and not alike (~); `no difference` if nothing is."""
    nodes = list(_nodes(left.graph, right.graph))
    known = left.graph.nodes.keys() | right.graph.nodes.keys()
    methods = list(_entries(_without(left.methods, known), _without(right.methods, known)))
    settings = list(_entries(left.settings, right.settings))
    if not nodes + methods + settings:
        return NONE
    lines = [f"- {left.title}", f"+ {right.title}"]
    for title, entries in {"nodes": nodes, "methods": methods, "settings": settings}.items():
        lines += ["", f"{title}:"] if entries else []
        width = max((len(name) for _, name, _ in entries), default=0)
        lines += [f"  {sign} {name:<{width}}  {what}".rstrip() for sign, name, what in entries]
    return "\n".join(lines)


Entry = tuple[str, str, str]  # sign, name, what differs


def _nodes(left: Graph, right: Graph) -> Iterator[Entry]:
    for name in dict.fromkeys([*left.nodes, *right.nodes]):
        if name not in right.nodes:
            yield "-", name, _whole(left.nodes[name])
        elif name not in left.nodes:
            yield "+", name, _whole(right.nodes[name])
        else:
            yield from _changes(left.nodes[name], right.nodes[name])


def _whole(node: Node) -> str:
    return f"{node.place}  " + ", ".join(f"{word} {value}" for word, value in _facts(node).items() if value != "-")


def _changes(left: Node, right: Node) -> Iterator[Entry]:
    """A line for the code and one for each fact, of which the first names the node."""
    sign, name = "~", left.id
    if left.place != right.place:
        yield sign, name, f"{left.place} -> {right.place}"
        sign, name = " ", ""
    for (word, before), after in zip(_facts(left).items(), _facts(right).values(), strict=True):
        if before != after:
            yield sign, name, f"{word} {before} -> {after}"
            sign, name = " ", ""


def _facts(node: Node) -> dict[str, str]:
    return {
        "type": TYPES[node.kind],
        "role": node.models or "-",
        "reads": ", ".join(node.needs) or "-",
        "returns": returned(node),
        "rows of": node.space,
    }


def _entries(left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[Entry]:
    for name in dict.fromkeys([*left, *right]):
        if name not in right:
            yield "-", name, _written(left[name])
        elif name not in left:
            yield "+", name, _written(right[name])
        elif not _same(left[name], right[name]):
            yield "~", name, f"{_written(left[name])} -> {_written(right[name])}"


def _without(methods: Mapping[str, str], nodes: set[str]) -> dict[str, str]:
    return {name: written_in for name, written_in in methods.items() if name not in nodes}


def _same(left: Any, right: Any) -> bool:
    """Equal, or of one class and said with equal arguments: rewards and the like are compared by what they hold."""
    if type(left) is not type(right):
        return False
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    if not type(left).__module__.startswith("builtins") and hasattr(left, "__dict__"):
        mine, theirs = vars(left), vars(right)
        return mine.keys() == theirs.keys() and all(_same(mine[name], theirs[name]) for name in mine)
    return bool(left == right)


def _written(value: Any) -> str:
    """As in a config; of an object the class, and what differs from its class's defaults."""
    if isinstance(value, str):
        return value
    if not type(value).__module__.startswith("rlflow"):
        return repr(value)
    parameters = inspect.signature(type(value)).parameters
    said = {name: part for name, part in vars(value).items() if name in parameters and parameters[name].default != part}
    return f"{type(value).__name__}({', '.join(f'{name}={_written(part)}' for name, part in said.items())})"
