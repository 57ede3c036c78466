"""Which nodes follow from scores: samples that a reward fails on, and drops, are left out of what they see."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rlflow.dag.annotations import choices, members, names_fields
from rlflow.dag.node import Node
from rlflow.values.protocols import Written
from rlflow.values.rollout import Rollout


def scores_rows(node: Node) -> bool:
    """Whether a node may score responses: it reads their texts, and makes a value for each row."""
    if node.kind in ("train", "filter") or node.makes_rows or not (node.makes_value and node.has_rows):
        return False
    asked = [choice for value in node.inputs for choice in choices(value.annotation) if names_fields(choice)]
    return any(members(Written).keys() <= members(choice).keys() for choice in asked if choice is not Rollout)


def followed(order: Iterable[Node], space_of: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """For each node the rows whose scores it follows from, by what it reads.

    Args:
        order: The nodes, each after what it reads.
        space_of: By node, the rows of its value.
    """
    behind: dict[str, dict[str, None]] = {}  # by value: the rows whose scores it follows from
    found: dict[str, tuple[str, ...]] = {}
    for node in order:
        follows = {space: None for name in node.reads for space in behind.get(name, ())}
        found[node.id] = tuple(follows)
        behind[node.id] = follows | ({space_of[node.id]: None} if scores_rows(node) else {})
    return found
