"""Where each node stands in the tree of rows: prompts at its root, below them what nodes sample or make of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from rlflow.dag.annotations import choices, members, names_fields
from rlflow.dag.node import BATCH, Node
from rlflow.dag.problems import Problem
from rlflow.values.protocols import Written
from rlflow.values.rollout import Rollout


def with_rows(order: Iterable[Node], drops: bool) -> tuple[dict[str, Node], list[Problem]]:
    """The nodes by name, each with its `space`, `inside` and `follows`; and which read rows of several branches.

    A node sees the deepest rows that it reads plainly, and its value is of these unless it makes rows of its own.

    Args:
        order: The nodes, each after what it reads.
        drops: Whether samples that the module's reward fails on are dropped: what follows from scores leaves them out.
    """
    placed: dict[str, Node] = {}
    problems: list[Problem] = []
    for node in order:
        through: dict[str, str] = {}  # row space -> the first value that is read plainly in it
        for name in node.reads:
            if name not in node.each and (name not in placed or placed[name].has_rows):
                through.setdefault(_space_of(name, placed), name)
        inside = max(through, key=lambda space: len(levels(space, placed)), default=BATCH)
        problems += _apart(node, through, inside, placed)
        problems += _not_below(node, through, inside, placed)
        scored = [space for name in node.reads if drops and name in placed for space in _scored_behind(placed[name])]
        space, follows = node.id if node.makes_rows else inside, tuple(dict.fromkeys(scored))
        placed[node.id] = replace(node, space=space, inside=inside, follows=follows)
    return placed, problems


def levels(space: str, nodes: Mapping[str, Node]) -> tuple[str, ...]:
    """The names of the rows on the way from prompts to those of a space, its own last."""
    return (BATCH,) if space == BATCH else (*levels(nodes[space].inside, nodes), space)


def scores_rows(node: Node) -> bool:
    """Whether a node may score responses: it reads their texts, and makes a value for each row."""
    if node.kind in ("train", "filter") or node.makes_rows or not (node.makes_value and node.has_rows):
        return False
    asked = [choice for value in node.inputs for choice in choices(value.annotation) if names_fields(choice)]
    return any(members(Written).keys() <= members(choice).keys() for choice in asked if choice is not Rollout)


def _scored_behind(node: Node) -> tuple[str, ...]:
    """The rows whose scores a node's value follows from, or is."""
    return (*node.follows, node.space) if scores_rows(node) else node.follows


def _space_of(value: str, placed: Mapping[str, Node]) -> str:
    return placed[value].space if value in placed else BATCH


def _apart(node: Node, through: Mapping[str, str], inside: str, placed: Mapping[str, Node]) -> Iterator[Problem]:
    """Rows of another branch than the deepest ones."""
    for space in through:
        if space not in levels(inside, placed):
            read = [f"of `{each}` (in `{through[each]}`)" for each in through if each in (space, inside)]
            text = f"mixes rows {' and '.join(read)}, of which neither are below the others. Read one as `Each` in a"
            yield node.problem(f"{text} node that stands above both, or join them in a node that returns `Grown`")


def _not_below(node: Node, through: Mapping[str, str], inside: str, placed: Mapping[str, Node]) -> Iterator[Problem]:
    """What is read as `Each`, and of which no row is below those that the node sees."""
    for name in node.each:
        space = _space_of(name, placed)
        if name in placed and not placed[name].has_rows:
            yield node.problem(f"reads `{name}` as Each, and it is one number for all rows. Read it plainly")
        elif not through:
            text = f"reads only `Each`, such as `{name}`, so that it stands at no rows above them. Read a value of"
            yield node.problem(f"{text} those plainly too, such as `batch: Grouped`")
            return
        elif space == inside:
            text = f"reads `{name}` as Each, and `{through[inside]}` of the same rows plainly. Read both plainly, or"
            yield node.problem(f"{text} both as Each")
        elif inside not in levels(space, placed):
            text = f"reads `{name}` as Each, and its rows, of `{space}`, are not below those of `{inside}` (in"
            yield node.problem(f"{text} `{through[inside]}`). Read a value of rows above both plainly")
