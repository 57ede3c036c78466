"""The `nodes` of configs and options, layer upon layer, with the file and line of all that is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from rlflow.config.layers import Appended, Layer, Text
from rlflow.config.reading import composed, constructed
from rlflow.dag.entry import Entry, Place
from rlflow.dag.node import place
from rlflow.dag.problems import GraphError, Problem
from rlflow.errors import UserError, did_you_mean

NODES = "nodes"
NOTHING = type(None)
KEYS: Mapping[str, tuple[tuple[type, ...], str]] = {  # of an entry: the types of its value, and what they are called
    "id": ((str,), "a name"),
    "role": ((str, NOTHING), "the name of a model, `rollout`, or null"),
    "type": ((str, NOTHING), "`train`, `filter` or null"),
    "generates": ((str, list), "the name of a language model, or a list of them"),
    "uses": ((str, list, NOTHING), "the name of a frozen model, a list of them, or null"),
    "dependencies": ((list, dict), "a list of values, or a mapping of parameters to values"),
    "call": ((str,), "a dotted path"),
    "parameters": ((dict,), "a mapping"),
    "returns": ((str,), "`PerSample`, `PerToken` or `Scalar`"),
    "remove": ((bool,), "true or false"),
}


def read_entries(layers: Sequence[Layer]) -> tuple[Entry, ...]:
    """What the configs and options of a command line write of nodes, in the order in which ids are first written.

    A later config's entry with a `call` stands in the place of an earlier one of its id; one without changes the keys
    that it names. So does `--nodes.ID.parameters.x 3`.

    Raises:
        GraphError: All that is wrong with entries as such, each with file and line.
    """
    found: dict[str, Entry] = {}
    problems: list[Problem] = []
    for file, section in _sections(layers):
        layer: dict[str, Entry] = {}
        for item in _items(section, file, problems):
            entry = _entry(item, file, problems)
            if entry is None:
                continue
            if entry.id in layer:
                before = place(*layer[entry.id].place)
                problems.append(entry.problem(f"is written before, in {before}. Rename or delete one", "id"))
            layer[entry.id] = entry
        found |= {name: entry.after(found.get(name)) for name, entry in layer.items()}
    if problems:
        raise GraphError(*problems)
    return tuple(found.values())


def as_written(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """The entries as one config would write them."""
    return [{"id": entry.id, **entry.keys} for entry in entries]


def _sections(layers: Sequence[Layer]) -> Iterator[tuple[str, yaml.Node]]:
    """What each config and option says of nodes, and the name of that config or option."""
    for layer in layers:
        if isinstance(layer.node, yaml.MappingNode):
            yield from ((layer.source, section) for key, section in layer.node.value if key.value == NODES)
        elif NODES in layer.tree:
            yield layer.source, composed(_whole(layer.tree[NODES]), f"`{layer.source}`")


def _whole(value: Any) -> str:
    """An option's text as a list of entries: `nodes.a.parameters.x` changes one of them."""
    if isinstance(value, Text):
        return value.text
    if isinstance(value, Appended):
        raise UserError(f"`--{NODES}+` adds to a list, and nodes are added as they are; write `--{NODES}`")
    (node, value), keys = next(iter(value.items())), []
    while isinstance(value, dict):
        key, value = next(iter(value.items()))
        keys.append(key)
    if isinstance(value, Appended):
        raise UserError(f"`--{NODES}.{node}+` adds to a list, and that is none; leave `+` out")
    text = value.text
    for key in reversed(keys[1:]):
        text = f"{{{key}: {text}}}"
    return f"[{{id: {node}, {keys[0]}: {text}}}]" if keys else f"[{text}]"


def _items(section: yaml.Node, file: str, problems: list[Problem]) -> list[yaml.Node]:
    if isinstance(section, yaml.SequenceNode):
        return list(section.value)
    if section.value not in ("", "null", "~"):
        text = f"`{NODES}` is {constructed(section, f'`{NODES}`')!r:.80}; write a list, each node as `- id: ...`"
        problems.append(Problem(*_place(section, file), text))
    return []


def _entry(item: yaml.Node, file: str, problems: list[Problem]) -> Entry | None:
    """One entry; None where it cannot be told which node it is of."""
    values = constructed(item, f"an entry of `{NODES}`")
    if not isinstance(values, dict) or not isinstance(values.get("id"), str):
        found = f"an entry of `{NODES}` is {values!r:.80}, without the name of a node"
        problems.append(Problem(*_place(item, file), f"{found}. Write `- id: ...`"))
        return None
    places = dict(_places(item, file))
    entry = Entry(values.pop("id"), values, _place(item, file), places)
    for key, value in values.items():
        if key not in KEYS:
            known = did_you_mean(str(key), KEYS) or f" Known here: {', '.join(KEYS)}."
            problems.append(entry.problem(f"has a key `{key}`, which is no known one.{known}", str(key)))
            continue
        types, called = KEYS[key]
        names = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
        of_names = key not in ("dependencies", "uses") or all(isinstance(name, str) for name in names)
        if not isinstance(value, types) or not of_names:
            problems.append(entry.problem(f"has the `{key}` {value!r:.80}. Give {called}", key))
    return entry


def _places(item: yaml.Node, file: str, above: str = "") -> Iterator[tuple[str, Place]]:
    """The place of each key, and of each within it, by dotted path."""
    for key, value in item.value:
        yield f"{above}{key.value}", _place(key, file)
        if not above and isinstance(value, yaml.MappingNode):
            yield from _places(value, file, f"{key.value}.")


def _place(node: yaml.Node, file: str) -> Place:
    return file, node.start_mark.line + 1
