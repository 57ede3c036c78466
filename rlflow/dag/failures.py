"""Samples that a reward fails on, for training to leave them out: nodes that the framework adds to the graph.

Beside a node that scores stands one more, `rewards_failed` beside `rewards`, whose value says of each row whether the
scorer failed on it, and what is to be done. It is exchanged, kept and replayed as any other value is. Nodes that train
or filter on what follows from the scores are told of it: they read it too, but are not called with it. A node that
wants to know it names it as a parameter: `rewards_failed: PerSample | None = None`; `rewards` may be the scorer, or any
value of its rows that follows from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from rlflow.dag.annotations import accepts, choices, members, names_fields
from rlflow.dag.node import BATCH, Input, Node
from rlflow.dag.problems import Problem
from rlflow.dag.row_spaces import Spaces
from rlflow.values.cuts import PerSample
from rlflow.values.protocols import Grouped, Written
from rlflow.values.rollout import Rollout

MASK, SKIP = 1, 2  # what is to be done with a row; 0 where it was scored


def failed(scorer: str) -> str:
    """The name of the value that tells of a scorer's failures."""
    return f"{scorer}_failed"


def tells(name: str, nodes: Iterable[str]) -> bool:
    """Whether a value of this name tells of failures of one of these nodes."""
    return any(name == failed(scorer) or name.startswith(f"{failed(scorer)}_in_") for scorer in nodes)


def telling(nodes: Mapping[str, Node]) -> tuple[dict[str, Node], list[Problem]]:
    """Nodes that tell of each scorer's failures, or of those behind a value that a node asks for, by name.

    And what is wrong: nodes of the user's that have such a name.
    """
    found, problems = dict[str, Node](), []
    for scorer in filter(scores_rows, nodes.values()):
        name = failed(scorer.id)
        if name in nodes:
            problems.append(_taken(nodes[name], scorer))
        else:
            found[name] = _telling(name, scorer, (Input(scorer.id, True, scorer.returns),), scorer.id)
    of_values = {failed(node.id): node for node in nodes.values()}
    asked = dict.fromkeys(value.name for node in nodes.values() for value in node.inputs)
    for name in (name for name in asked if name in of_values and name not in {**nodes, **found}):
        behind = [failed(scorer) for scorer in _behind(of_values[name], nodes) if failed(scorer) in found]
        if behind:
            inputs = tuple(Input(each, True, PerSample) for each in behind)
            found[name] = _telling(name, of_values[name], inputs, behind[0])
    return found, problems


def told(nodes: Mapping[str, Node], order: Sequence[Node], spaces: Spaces) -> tuple[dict[str, Node], list[Problem]]:
    """The nodes, those told that train or filter on scores, and those added that tell these of rows of another branch.

    Args:
        nodes: By name, in the order of declaration, with those of `telling`.
        order: Those, each after what it reads.
        spaces: Their rows.
    """
    found, problems = dict(nodes), []
    of_below: dict[tuple[str, str], str] = {}  # by scorer and rows above its own: the node that tells of these
    for scorer in (
        nodes[node.failures_of] for node in order if node.failures_of and scores_rows(nodes[node.failures_of])
    ):
        name = failed(scorer.id)
        for node in _following(scorer, order):
            rows = _common(spaces, spaces.of[scorer.id], spaces.inside[node.id])
            of = name
            if rows != spaces.of[scorer.id]:
                if not _grouped(rows, nodes):
                    problems.append(_untold(node, scorer, rows))
                    continue
                of = of_below.setdefault((scorer.id, rows), f"{name}_in_{rows}")
                if of in nodes:
                    problems.append(_taken(nodes[of], scorer))
                    continue
                each = Input(name, True, PerSample, each=True)
                found[of] = _telling(of, scorer, (Input(rows, True, Grouped), each), name)
            hears = found[node.id]
            if of not in hears.reads:
                inputs = (*hears.inputs, Input(of, True, PerSample))
                found[node.id] = replace(hears, inputs=inputs, told=(*hears.told, of))
    return found, problems


def scores_rows(node: Node) -> bool:
    """Whether a node may score responses: it reads their texts, and makes a value for each row."""
    if node.kind in ("train", "filter") or node.makes_rows or not (node.makes_value and node.has_rows):
        return False
    asked = [choice for value in node.inputs for choice in choices(value.annotation) if names_fields(choice)]
    return any(members(Written).keys() <= members(choice).keys() for choice in asked if choice is not Rollout)


def _behind(node: Node, nodes: Mapping[str, Node]) -> list[str]:
    """The scorers that a value follows from within its rows, in the order of declaration."""
    left, known = [node.id], set[str]()
    while left:
        name = left.pop()
        known.add(name)
        if not scores_rows(nodes[name]):
            values = (value.name for value in nodes[name].inputs if not value.each)
            left += [of for of in values if of in nodes and of not in known and not nodes[of].makes_rows]
    return [name for name in nodes if name in known and scores_rows(nodes[name])]


def _following(scorer: Node, order: Sequence[Node]) -> Iterator[Node]:
    """The nodes that train or filter on what follows from a node's value."""
    known = {scorer.id}
    for node in order:
        if known.isdisjoint(node.reads):
            continue
        known.add(node.id)
        if node.kind in ("train", "filter"):
            yield node


def _common(spaces: Spaces, one: str, other: str) -> str:
    """The deepest rows that rows of both descend from, or are."""
    return next(rows for rows in reversed(spaces.lines[one]) if rows in spaces.lines[other])


def _grouped(rows: str, nodes: Mapping[str, Node]) -> bool:
    return rows == BATCH or accepts(Grouped, nodes[rows].returns)


def _telling(name: str, scorer: Node, inputs: tuple[Input, ...], of: str) -> Node:
    return Node(name, inputs, None, "compute", PerSample, scorer.file, scorer.line, failures_of=of)


def _taken(node: Node, scorer: Node) -> Problem:
    text = f"`{node.id}` is what tells of samples that `{scorer.id}` fails to score. Rename the node"
    return Problem(node.file, node.line, text)


def _untold(node: Node, scorer: Node, rows: str) -> Problem:
    text = f"`{node.id}` follows from what `{scorer.id}` scores through rows of `{rows}`, which cannot be told of"
    return Problem(node.file, node.line, f"{text} failures. Set the reward's `on_error` to raise or zero")
