"""The rows of values: a tree of row spaces, and where in it each node stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlflow.dag.annotations import type_name
from rlflow.dag.node import BATCH, Node
from rlflow.dag.problems import Problem
from rlflow.values.each import grown


@dataclass(frozen=True)
class Spaces:
    """The rows of a graph's values: a tree of row spaces, of which `batch` is the root.

    Attributes:
        of: By node: the rows of its value, `batch` or the id of the node that made them.
        inside: By node: the rows in which it sees what it reads, the deepest of those that it reads plainly.
        lines: By row space: the spaces from the root to it.
    """

    of: dict[str, str]
    inside: dict[str, str]
    lines: dict[str, tuple[str, ...]]


def row_spaces(order: Sequence[Node]) -> tuple[Spaces, list[Problem]]:
    """The rows of each node's value, and the nodes that read rows which do not lie on one line of the tree.

    Args:
        order: The nodes, each after what it reads.
    """
    found = Spaces({}, {}, {BATCH: (BATCH,)})
    rowless = {node.id for node in order if not node.has_rows}
    problems: list[Problem] = []
    for node in order:
        through: dict[str, str] = {}  # row space -> the first value that is read plainly in it
        for name in node.reads:
            if name not in rowless and name not in node.each:
                through.setdefault(found.of.get(name, BATCH), name)
        deepest = max(through, key=lambda space: len(found.lines[space]), default=BATCH)
        problems += _apart(node, through, deepest, found)
        problems += _not_below(node, through, deepest, found, rowless)
        found.inside[node.id] = deepest
        found.of[node.id] = node.id if node.makes_rows else deepest
        if node.makes_rows:
            found.lines[node.id] = (*found.lines[deepest], node.id)
    return found, problems


def _apart(node: Node, through: Mapping[str, str], deepest: str, found: Spaces) -> Iterator[Problem]:
    """Rows of another branch than the deepest ones."""
    for space in through:
        if space not in found.lines[deepest]:
            read = [f"of `{each}` (in `{through[each]}`)" for each in through if each in (space, deepest)]
            text = f"mixes rows {' and '.join(read)}, of which neither are below the others. Read one as `Each` in a"
            yield _problem(node, f"{text} node that stands above both, or join them in a node that returns `Grown`")


def _not_below(
    node: Node, through: Mapping[str, str], inside: str, found: Spaces, rowless: set[str]
) -> Iterator[Problem]:
    """What is read as `Each`, and of which no row is below those that the node sees."""
    for name in node.each:
        space = found.of.get(name, BATCH)
        if name in rowless:
            yield _problem(node, f"reads `{name}` as Each, and it is one number for all rows. Read it plainly")
        elif not through:
            text = f"reads only `Each`, such as `{name}`, so that it stands at no rows above them. Read a value of"
            yield _problem(node, f"{text} those plainly too, such as `batch: Grouped`")
            return
        elif space == inside:
            text = f"reads `{name}` as Each, and `{through[inside]}` of the same rows plainly. Read both plainly, or"
            yield _problem(node, f"{text} both as Each")
        elif inside not in found.lines[space]:
            text = f"reads `{name}` as Each, and its rows, of `{space}`, are not below those of `{inside}` (in"
            yield _problem(node, f"{text} `{through[inside]}`). Read a value of rows above both plainly")


def mislaid(nodes: Mapping[str, Node], spaces: Spaces, masks: Mapping[str, str]) -> Iterator[Problem]:
    """Train nodes whose rows are not those of their loss alone.

    Args:
        nodes: The graph's nodes.
        spaces: Their rows.
        masks: By train node: the value that its loss is of.
    """
    for node in nodes.values():
        if node.kind != "train" or node.id not in spaces.inside:
            continue
        for name in node.each:
            text = f"trains and reads `{name}` as Each, and mini-batches are cut by the rows of the loss"
            yield _problem(node, f"{text}. Compute what it needs of them in a node of its own")
        masked, inside = masks.get(node.id), spaces.inside[node.id]
        if masked is not None and not node.each and (of := spaces.of.get(masked, BATCH)) != inside:
            below = next(name for name in node.reads if spaces.of.get(name, BATCH) == inside)
            text = f"trains on rows of `{of}` (in `{masked}`) and reads `{below}` of rows of `{inside}` below them"
            yield _problem(node, f"{text}. Read it as Each in a node before, which makes one value for each row")


def unread_grown(nodes: Mapping[str, Node]) -> Iterator[Problem]:
    """Nodes that make rows and read none to put them below."""
    for node in nodes.values():
        if node.grows and not node.reads:
            text = f"returns {type_name(grown(node.returns))} and reads no rows that the new ones are below"
            yield _problem(node, f"{text}. Read those, such as `batch: Batch`")


def _problem(node: Node, text: str) -> Problem:
    return Problem(node.file, node.line, f"`{node.id}` {text}")
