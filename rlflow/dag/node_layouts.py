"""Where each node runs: the layout of its role, of its policies' engines, or of what it reads."""

from __future__ import annotations

from collections.abc import Mapping

from rlflow.dag.graph import Graph
from rlflow.dag.node import BATCH, Node, engine_of
from rlflow.dag.tasks import rank_ranges
from rlflow.errors import UserError
from rlflow.values.columns import Column, columns
from rlflow.values.cuts import Cut
from rlflow.values.layout import Layout


def node_layouts(graph: Graph, layouts: Mapping[str, Layout], world: tuple[int, ...]) -> dict[str, Layout]:
    """The layout of every node, and of `batch` where it is read."""
    placed: dict[str, Layout] = {}
    fixed = {node.id: _engines_of_node(node, layouts) for node in graph.order if node.generates}
    fixed |= {node.id: layouts[node.role] for node in graph.order if node.role is not None and not node.generates}
    policies = graph.policies()
    otherwise = layouts[engine_of(policies[0])].ranks if policies else world
    for node in graph.order:
        placed[node.id] = fixed.get(node.id) or _without_role(node, graph, placed, fixed, otherwise)
    readers = graph.readers(BATCH)
    if not readers:
        return placed
    first = placed[readers[0].id]
    return {BATCH: Layout(first.ranks, first.shards), **placed}


def _engines_of_node(node: Node, layouts: Mapping[str, Layout]) -> Layout:
    """Where a node generates: all of its policies have engines there."""
    first, *others = node.generates
    there = layouts[engine_of(first)]
    for other in others:
        if layouts[engine_of(other)] != there:
            raise UserError(
                f"node `{node.id}` generates with `{first}` on {_described(there)} and with `{other}` on"
                f" {_described(layouts[engine_of(other)])}; place `{engine_of(first)}` and `{engine_of(other)}` alike,"
                " or generate in a node for each"
            )
    return there


def _described(engines: Layout) -> str:
    share = f", {engines.copies} to an engine" if engines.copies > 1 else ""
    return f"{rank_ranges(engines.ranks)}{share}"


def _without_role(
    node: Node, graph: Graph, placed: Mapping[str, Layout], fixed: Mapping[str, Layout], otherwise: tuple[int, ...]
) -> Layout:
    """Where a node runs that has no role: in whole groups if it must see them, else where most of what it reads is.

    Args:
        node: It.
        graph: Of the module.
        placed: The layouts of the values that are planned so far, in the order in which they are.
        fixed: Those of the nodes that have a role or generate.
        otherwise: The ranks of a node that reads nothing but the batch.
    """
    made = [name for name in placed if name in node.reads]
    at_home = [name for name in made if _reads_at_home(node, name, graph)]
    beside = [placed[name] for name in made if graph.nodes[name].has_rows and graph.space_of(name) == node.inside]
    if at_home or not beside or _sees_groups(node, graph):
        ranks = placed[(at_home or made)[-1]].ranks if made else otherwise
        return Layout(ranks, len(ranks))
    there = {**fixed, **placed}
    most = max(reversed(beside), key=lambda layout: _held(node, layout, graph, there))  # of equals the last made
    # Ranks that share an engine need not work twice.
    return Layout(most.ranks, len(most.ranks)) if most.dealing == "groups" else most


def _sees_groups(node: Node, graph: Graph) -> bool:
    """Whether a node may compare a row with others of its group, or makes rows of them: these are on one rank."""
    if node.makes_rows or node.kind == "filter" or any(each.each for each in node.inputs):
        return True
    return any(column.cut is Cut.PATH for name in node.reads for column in _columns_read(node, name, graph))


def _held(node: Node, layout: Layout, graph: Graph, there: Mapping[str, Layout]) -> tuple[int, int]:
    """How many columns by token, and how many by row, of what a node reads are in a layout: made or read there.

    Args:
        node: It.
        layout: Where.
        graph: Of the module.
        there: By node, where it runs, as far as that is known.
    """
    tokens = rows = 0
    for name in node.reads:
        readers = [each for each in graph.readers(name) if there.get(each.id) == layout]
        readers = [each for each in readers if graph.seen_in(each, name) == node.inside]
        is_made_there = there.get(name) == layout and graph.space_of(name) == node.inside
        read = frozenset[str]().union(*(graph.fields[each.id, name].names for each in readers))
        held = [each for each in _columns_read(node, name, graph) if is_made_there or each.name in read]
        tokens += sum(each.cut in (Cut.TOKEN, Cut.RAGGED) for each in held)
        rows += sum(each.cut is Cut.SAMPLE for each in held)
    return tokens, rows


def _columns_read(node: Node, value: str, graph: Graph) -> list[Column]:
    names = graph.fields[node.id, value].names
    return [column for column in columns(graph.type_of(value)) if column.name in names]


def _reads_at_home(node: Node, value: str, graph: Graph) -> bool:
    return any(column.home for column in _columns_read(node, value, graph))
