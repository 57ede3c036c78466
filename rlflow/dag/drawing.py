"""A graph and its plan as text: a table, and Mermaid's language."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import get_args

from rlflow.dag.annotations import type_name
from rlflow.dag.graph import Graph
from rlflow.dag.node import BATCH, Kind, Node
from rlflow.dag.planner import Plan
from rlflow.dag.tasks import rank_ranges, task_lines
from rlflow.values.each import After, new_rows

DATASET = "DATASET"
TYPES: dict[Kind, str] = {kind: kind.upper() for kind in get_args(Kind)} | {"train": "MODEL_TRAIN"}
COLOURS = {  # of a type: fill, outline
    DATASET: ("#f1f3f5", "#868e96"),
    "COMPUTE": ("#e7f5ff", "#1c7ed6"),
    "MODEL_INFERENCE": ("#f3f0ff", "#7048e8"),
    "ROLLOUT": ("#ebfbee", "#2f9e44"),
    "MODEL_TRAIN": ("#fff4e6", "#e8590c"),
    "FILTER": ("#fff0f6", "#c2255c"),
}


def text(graph: Graph, plan: Plan, rank: int) -> str:
    """The nodes as a table in the order of execution, what each reads and why, then the plan of `rank`."""
    header = ("node", "role", "type", "returns", "rows of", "reads", "written in")
    rows = [
        (
            node.id,
            _models(node) or "-",
            TYPES[node.kind],
            type_name(new_rows(node.returns) if node.grows else node.returns),
            node.space,
            ", ".join(node.needs),
            node.place,
        )
        for node in graph.order
    ]
    tasks = (f"{i:>3}  {line}" for i, line in enumerate(task_lines(plan.for_rank(rank)), 1))
    title = f"plan of rank {rank}, digest {plan.digest[:12]}:"
    return "\n".join([*_table([header, *rows]), "", *_table(_reads(graph)), "", title, *tasks])


def _models(node: Node) -> str:
    """The models that a node runs on, and the others that it uses."""
    return node.models + (f", uses {', '.join(node.uses)}" if node.uses else "")


def _reads(graph: Graph) -> list[tuple[str, ...]]:
    """A line for each value that a node reads: the type that it asks for, and the fields that this type names."""
    read = [graph.fields[node.id, value] for node in graph.order for value in node.reads]
    rows = [(each.node, each.value, each.asked, str(each) or "-") for each in read]
    after = [(node.id, name, type_name(After), "-") for node in graph.order for name in node.after]
    return [("node", "reads", "as", "fields"), *rows, *after]


def _table(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def mermaid(graph: Graph, plan: Plan) -> str:
    """The graph in Mermaid's language: boxes are values, coloured by type; dotted edges are exchanged between ranks."""
    boxes, types = {}, dict[str, None]()
    for name, layout in plan.layouts().items():
        kind = DATASET if name == BATCH else TYPES[graph.nodes[name].kind]
        models = "" if name == BATCH else _models(graph.nodes[name])
        role, placed = f"{models} · {kind}" if models else kind, f"{rank_ranges(layout.ranks)}, {layout.shard_by}"
        # a prefix, for `end`, `class`, `style` and others are words of Mermaid's
        boxes[name] = f'    node_{name}["<b>{name}</b><br/>{role}<br/>{placed}"]:::{kind}'
        types[kind] = None
    lines = ["flowchart TD"]
    if graph.block:
        repeated = [boxes.pop(name) for name in (BATCH, *(node.id for node in graph.block))]
        frame = '    subgraph repeats ["repeats until the step is full"]'
        lines += [frame, *(f"    {box}" for box in repeated), "    end"]
    colours = ("    classDef {} fill:{},stroke:{},color:#212529".format(kind, *COLOURS[kind]) for kind in types)
    return "\n".join([*lines, *boxes.values(), *_edges(graph, plan), *colours]) + "\n"


def _edges(graph: Graph, plan: Plan) -> Iterator[str]:
    for node in graph.order:
        for name in node.reads:
            sent = plan.exchange(name, node, graph.seen_in(node, name)) is not None
            yield f"    node_{name} {'-. exchange .->' if sent else '-->'} node_{node.id}"
        yield from (f"    node_{name} -- trained --> node_{node.id}" for name in node.after)
