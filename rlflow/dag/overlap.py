"""Which nodes run ahead of training, where steps overlap."""

from __future__ import annotations

from collections.abc import Mapping

from rlflow.dag.graph import Graph
from rlflow.dag.node import BATCH, ROLLOUT, Node
from rlflow.dag.tasks import rank_ranges
from rlflow.errors import UserError
from rlflow.values.layout import Layout


def ahead_of_training(graph: Graph, placed: Mapping[str, Layout]) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """The nodes that need no rank that trains, nor a value made there; and the others."""
    training = {rank for node in graph.order if node.kind == "train" for rank in placed[node.id].ranks}
    ahead: list[Node] = []
    for node in graph.order:
        made = {BATCH, *(earlier.id for earlier in ahead)}
        if not training.intersection(placed[node.id].ranks) and made.issuperset(node.needs):
            ahead.append(node)
    samples = [node for node in graph.order if node.kind == "rollout"]
    if not samples:
        raise UserError("`trainer.max_staleness` is set and no node generates, so nothing can run ahead; leave it out")
    for node in samples:
        if node not in ahead:
            both = training.intersection(placed[node.id].ranks)
            why = "it reads what training makes"
            if both:
                why = f"{rank_ranges(tuple(sorted(both)))} would both generate and train"
            elif after := _trains_before(node, graph):
                raise UserError(
                    f"`trainer.max_staleness` is set and `{node.id}` generates after `{after}` has trained, so it"
                    " cannot run ahead of training; leave `max_staleness` out, or generate without it"
                )
            raise UserError(
                f"`trainer.max_staleness` is set and `{node.id}` cannot run ahead of training: {why}; place `{ROLLOUT}`"
                " and the trained roles on ranks of their own under `placement`"
            )
    return tuple(ahead), tuple(node for node in graph.order if node not in ahead)


def _trains_before(node: Node, graph: Graph) -> str:
    """A train node that comes before `node`; empty where none does."""
    todo, known = [node], {node.id}
    while todo:
        for name in todo.pop().needs:
            if name == BATCH or name in known:
                continue
            if graph.nodes[name].kind == "train":
                return name
            known.add(name)
            todo.append(graph.nodes[name])
    return ""
