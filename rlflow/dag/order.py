"""The order of execution: by depth, then declaration; what a filter waits for first, training last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from types import MappingProxyType

from rlflow.dag.node import Node
from rlflow.dag.problems import Problem


def block(nodes: Mapping[str, Node]) -> set[str]:
    """The filter and its ancestors, which repeat until a step is full; empty where there is no filter."""
    return with_ancestors([node.id for node in nodes.values() if node.kind == "filter"], nodes)


def with_ancestors(names: Iterable[str], nodes: Mapping[str, Node]) -> set[str]:
    """These nodes and all that come before them."""
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name in nodes and name not in found:
            found.add(name)
            todo += nodes[name].needs
    return found


def in_order(
    nodes: Mapping[str, Node], averages: Mapping[str, str] = MappingProxyType({})
) -> tuple[tuple[Node, ...], list[Problem]]:
    """The nodes in the order of execution; and the cycles, whose nodes are left out.

    That is by depth, then declaration; a filter and its ancestors before all others, train nodes last. A train node
    that others come after stands at its depth: after all nodes that use its role, or a moving average of it, and do not
    come after it, so that these see the weights of the step's start.

    Args:
        nodes: By name, in the order of declaration.
        averages: By role that is a moving average: the role that it follows.
    """
    needs = {node.id: [name for name in node.needs if name in nodes] for node in nodes.values()}
    problems = _without_cycles(nodes, needs, "Break the cycle")
    followed = {train for name in needs for train in nodes[name].after}
    trained = [nodes[name] for name in needs if nodes[name].kind == "train" and name in followed]
    later = {train.id: _descendants(train.id, needs) for train in trained}
    for train in trained:
        using = [name for name in needs if _uses(nodes[name], train.role, averages)]
        needs[train.id] += [name for name in using if name not in later[train.id]]
    why = "A train node that is read as Trained comes after what uses its role before. Break the cycle"
    problems += _without_cycles(nodes, needs, why)

    depth: dict[str, int] = {}
    for name in TopologicalSorter(needs).static_order():
        depth[name] = 1 + max((depth[needed] for needed in needs.get(name, ())), default=0)
    first, last = block(nodes), {node.id for node in nodes.values() if node.kind == "train" and node not in trained}
    order = sorted(needs, key=lambda name: (name in last, name not in first, depth[name]))
    return tuple(nodes[name] for name in order), problems


def _without_cycles(nodes: Mapping[str, Node], needs: dict[str, list[str]], why: str) -> list[Problem]:
    """Take the nodes of all cycles out of `needs`; what is wrong with them."""
    problems: list[Problem] = []
    while True:
        try:
            TopologicalSorter(needs).prepare()
            return problems
        except CycleError as error:
            cycle: list[str] = error.args[1]  # each read by the next, the first once more at the end
        path = " -> ".join(f"`{name}`" for name in cycle)
        node = nodes[cycle[0]]
        problems.append(node.problem(f"waits for itself: {path}. {why}"))
        for name in set(cycle):
            del needs[name]
        for name, of in needs.items():
            needs[name] = [needed for needed in of if needed in needs]


def _descendants(name: str, needs: Mapping[str, Sequence[str]]) -> set[str]:
    """What comes after a node, itself included."""
    found = {name}
    while more := {other for other, of in needs.items() if other not in found and not found.isdisjoint(of)}:
        found |= more
    return found


def _uses(node: Node, role: str | None, averages: Mapping[str, str]) -> bool:
    """Whether a node that does not train calls this model or an average of it.

    What generates, and does not say with which, may do so with any that is trained.
    """
    called = {node.role, *node.uses, *node.generates}
    called |= {owner for average, owner in averages.items() if average in called}
    generates = node.kind == "rollout" and not node.generates
    return node.kind != "train" and (generates or role in called)
