"""A graph and its plan for the eye: as a table, as Mermaid, and as an SVG made without any other program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from rlflow.commands.graph_layers import Drawing, Edge, Segment, Spot, arrange
from rlflow.dag.annotations import type_name
from rlflow.dag.graph import Graph
from rlflow.dag.node import BATCH, Kind, Node
from rlflow.dag.planner import Plan
from rlflow.dag.tasks import describe, rank_ranges, task_lines
from rlflow.values.each import Trained, grown

TYPES: dict[Kind, str] = {
    "compute": "COMPUTE",
    "model_inference": "MODEL_INFERENCE",
    "rollout": "ROLLOUT",
    "train": "MODEL_TRAIN",
    "filter": "FILTER",
}
DATASET = "DATASET"
COLOURS = {  # of a type: fill, outline
    DATASET: ("#f1f3f5", "#868e96"),
    "COMPUTE": ("#e7f5ff", "#1c7ed6"),
    "MODEL_INFERENCE": ("#f3f0ff", "#7048e8"),
    "ROLLOUT": ("#ebfbee", "#2f9e44"),
    "MODEL_TRAIN": ("#fff4e6", "#e8590c"),
    "FILTER": ("#fff0f6", "#c2255c"),
}
SAME, EXCHANGED, AFTER = "same", "exchanged", "after"
STROKES = {
    SAME: 'stroke="#868e96"',
    EXCHANGED: 'stroke="#d6336c" stroke-dasharray="6 4"',
    AFTER: 'stroke="#e8590c" stroke-dasharray="1.5 3"',
}
REPEATS = "repeats until the step is full"
MEANINGS = {
    SAME: "same layout: no byte moves",
    EXCHANGED: "exchange between layouts",
    AFTER: "after its training: no value",
}
ARROWS = {SAME: "-->", EXCHANGED: "-. exchange .->", AFTER: "-- trained -->"}

BOX_HEIGHT, LAYER_GAP, MARGIN, PADDING = 66.0, 54.0, 24.0, 14.0  # pixels
PORT_GAP = 22.0  # pixels between the ends of edges at one side of a box
NAME, ROLE, PLACE = 13.0, 11.0, 10.0  # font sizes, pixels
CHARACTER = 0.61  # width of a character of a monospaced font, in font sizes


def text(graph: Graph, plan: Plan, rank: int) -> str:
    """The nodes as a table in the order of execution, what each reads and why, then the plan of `rank`."""
    header = ("node", "role", "type", "returns", "rows of", "reads", "written in")
    rows = [
        (
            node.id,
            models_of(node) or "-",
            TYPES[node.kind],
            returned(node),
            node.space,
            ", ".join(node.needs),
            node.place,
        )
        for node in graph.order
    ]
    tasks = (f"{i:>3}  {line}" for i, line in enumerate(task_lines(plan.for_rank(rank)), 1))
    return "\n".join(
        [
            *_table([header, *rows]),
            "",
            *_table(_reads(graph)),
            "",
            f"plan of rank {rank}, digest {plan.digest[:12]}:",
            *tasks,
        ]
    )


def _reads(graph: Graph) -> list[tuple[str, ...]]:
    """What each node reads: the value, the type that it asks for, and the fields that this names."""
    read = [graph.fields[node.id, value] for node in graph.order for value in node.reads]
    rows = [(each.node, each.value, each.asked, str(each) or "-") for each in read]
    after = [(node.id, name, type_name(Trained), "-") for node in graph.order for name in node.after]
    return [("node", "reads", "as", "fields"), *rows, *after]


def mermaid(graph: Graph, plan: Plan) -> str:
    """The graph in Mermaid's language; dotted edges are exchanges between layouts or levels of rows."""
    boxes = _boxes(graph, plan)
    lines = ["flowchart TD"]
    # a prefix, for `end`, `class`, `style` and others are words of Mermaid's
    drawn = {box.name: f'    node_{box.name}["<b>{box.name}</b><br/>{box.role}"]:::{box.type}' for box in boxes}
    if repeated := _repeated(graph):
        lines += [f'    subgraph repeats ["{REPEATS}"]', *(f"    {drawn.pop(name)}" for name in repeated), "    end"]
    lines += drawn.values()
    for edge in _edges(graph, plan):
        lines.append(f"    node_{edge.source} {ARROWS[edge.style]} node_{edge.target}")
    for name in dict.fromkeys(box.type for box in boxes):
        fill, outline = COLOURS[name]
        lines.append(f"    classDef {name} fill:{fill},stroke:{outline},color:#212529")
    return "\n".join(lines) + "\n"


def svg(graph: Graph, plan: Plan) -> str:
    """The graph as a picture: boxes coloured by type, in layers by depth; dashed edges are exchanges."""
    boxes = _boxes(graph, plan)
    edges = _edges(graph, plan)
    depth = _depths(graph, boxes)
    width_of = {box.name: _width(box) for box in boxes}
    drawing = arrange(depth, edges, width_of)
    legend = _legend(boxes, edges)

    width = max(drawing.width, legend.width) + 2 * MARGIN
    legend_top = _top(1 + max(depth.values())) - MARGIN
    height = legend_top + legend.height + MARGIN
    left = (width - drawing.width) / 2
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}"'
            f' viewBox="0 0 {width:.0f} {height:.0f}" role="img"'
            ' font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace">',
            "<defs>",
            *(_arrow(style) for style in STROKES if style in {SAME, EXCHANGED, *(edge.style for edge in edges)}),
            "</defs>",
            f'<rect width="{width:.0f}" height="{height:.0f}" rx="12" fill="#ffffff"/>',
            *_band(graph, depth, width),
            f'<g transform="translate({left:.1f} 0)">',
            *_curves(drawing, width_of),
            *(_rectangle(box, drawing.centres[Spot(box.name, depth[box.name])], depth[box.name]) for box in boxes),
            "</g>",
            f'<g transform="translate({(width - legend.width) / 2:.1f} {legend_top:.1f})">',
            *legend.lines,
            "</g>",
            "</svg>",
            "",
        ]
    )


@dataclass(frozen=True)
class _Box:
    """What a box says: the value's name, its role and type, where it is made; and the same in full, for the tooltip."""

    name: str
    type: str
    role: str
    placed: str
    tooltip: str


@dataclass(frozen=True)
class _Legend:
    lines: list[str]
    width: float
    height: float


def _boxes(graph: Graph, plan: Plan) -> list[_Box]:
    layouts = plan.layouts()
    boxes = []
    for name, layout in layouts.items():
        placed = f"{rank_ranges(layout.ranks)}, {layout.dealing}"
        if name == BATCH:
            boxes.append(_Box(name, DATASET, DATASET, placed, f"rows of the dataset, {describe(layout)}"))
        else:
            node = graph.nodes[name]
            kind = TYPES[node.kind]
            role = f"{models_of(node)} · {kind}" if node.models else kind
            tooltip = f"{returned(node)}, rows of {node.space}, {describe(layout)}, {node.place}"
            boxes.append(_Box(name, kind, role, placed, tooltip))
    return boxes


def _edges(graph: Graph, plan: Plan) -> list[Edge]:
    edges = []
    for node in graph.order:
        for name in node.reads:
            sent = plan.exchange(name, node, graph.seen_in(node, name)) is not None
            edges.append(Edge(name, node.id, EXCHANGED if sent else SAME))
        edges += [Edge(name, node.id, AFTER) for name in node.after]
    return edges


def models_of(node: Node) -> str:
    """The models that a node runs on, and those that it calls beside them."""
    return node.models + (f", uses {', '.join(node.uses)}" if node.uses else "")


def returned(node: Node) -> str:
    """What a node returns, as a user writes it."""
    return type_name(grown(node.returns) if node.grows else node.returns)


def _depths(graph: Graph, boxes: Sequence[_Box]) -> dict[str, int]:
    """The layer of each box: below all that it reads, and below a filter that it waits for; train nodes lowest."""
    depth = {box.name: 0 for box in boxes}
    above = -1
    for node in graph.order:
        depth[node.id] = 1 + max([above, *(depth[name] for name in node.needs)])
        if node.kind == "filter":
            above = depth[node.id]  # its ancestors come before it in the order, all others after
    lowest = max(depth.values())
    followed = {name for node in graph.order for name in node.after}
    return depth | {node.id: lowest for node in graph.order if node.kind == "train" and node.id not in followed}


def _repeated(graph: Graph) -> tuple[str, ...]:
    """The names of the boxes that a filter repeats."""
    return (BATCH, *(node.id for node in graph.block)) if graph.block else ()


def _band(graph: Graph, depth: Mapping[str, int], width: float) -> Iterable[str]:
    """Behind the layers that a filter repeats, which hold no other boxes."""
    if graph.filter is not None:
        bottom = _top(depth[graph.filter.id]) + BOX_HEIGHT + MARGIN
        yield f'<rect x="8" y="8" width="{width - 16:.0f}" height="{bottom - 8:.0f}" rx="10" fill="#f8f9fa"/>'
        yield f'<text x="{MARGIN:g}" y="{bottom - 8:.0f}" font-size="{PLACE:g}" fill="#868e96">{REPEATS}</text>'


def _top(layer: int) -> float:
    return MARGIN + layer * (BOX_HEIGHT + LAYER_GAP)


def _width(box: _Box) -> float:
    sizes = ((box.name, NAME), (box.role, ROLE), (box.placed, PLACE))
    return max(len(line) * size * CHARACTER for line, size in sizes) + 2 * PADDING


def _rectangle(box: _Box, centre: float, layer: int) -> str:
    fill, outline = COLOURS[box.type]
    width = _width(box)
    lines = (
        f'<text y="24" font-size="{NAME:g}" font-weight="bold" fill="#212529">{escape(box.name)}</text>',
        f'<text y="41" font-size="{ROLE:g}" fill="{outline}">{escape(box.role)}</text>',
        f'<text y="56" font-size="{PLACE:g}" fill="#868e96">{escape(box.placed)}</text>',
    )
    rectangle = f'<rect x="{-width / 2:.1f}" width="{width:.1f}" height="{BOX_HEIGHT:g}" rx="8"'
    return (
        f'<g transform="translate({centre:.1f} {_top(layer):.1f})" text-anchor="middle">'
        f"<title>{escape(box.name)}: {escape(box.tooltip)}</title>"
        f'{rectangle} fill="{fill}" stroke="{outline}" stroke-width="1.5"/>{"".join(lines)}</g>'
    )


def _curves(drawing: Drawing, width_of: Mapping[str, float]) -> Iterable[str]:
    """One path for each segment, with an arrow where it ends at a box, straight on where it passes a layer."""
    starts = _ports(drawing, width_of, upper=True)
    ends = _ports(drawing, width_of, upper=False)
    for segment in drawing.segments:
        passes = segment.lower.passing is not None
        x1, y1 = starts[segment], _top(segment.upper.layer) + BOX_HEIGHT
        x2, y2 = ends[segment], _top(segment.lower.layer) - (0 if passes else 2)
        bend = (y2 - y1) / 2
        path = f"M{x1:.1f} {y1:.1f}C{x1:.1f} {y1 + bend:.1f} {x2:.1f} {y2 - bend:.1f} {x2:.1f} {y2:.1f}"
        tail = f"V{y2 + BOX_HEIGHT:.1f}" if passes else ""
        arrow = "" if passes else f' marker-end="url(#{segment.style})"'
        yield f'<path d="{path}{tail}" fill="none" stroke-width="1.5" {STROKES[segment.style]}{arrow}/>'


def _ports(drawing: Drawing, width_of: Mapping[str, float], upper: bool) -> dict[Segment, float]:
    """Where each segment leaves its upper spot, or meets its lower one: side by side, ordered by their far ends."""
    at: dict[Spot, list[tuple[float, Segment]]] = {}
    for segment in drawing.segments:
        near, far = (segment.upper, segment.lower) if upper else (segment.lower, segment.upper)
        at.setdefault(near, []).append((drawing.centres[far], segment))
    ports = {}
    for spot, joined in at.items():
        room = 0.0 if spot.passing else width_of[spot.name] - 2 * PADDING
        gap = min(PORT_GAP, room / max(len(joined) - 1, 1))
        for i, (_, segment) in enumerate(sorted(joined, key=lambda pair: pair[0])):
            ports[segment] = drawing.centres[spot] + (i - (len(joined) - 1) / 2) * gap
    return ports


def _arrow(style: str) -> str:
    colour = STROKES[style].split('"')[1]
    return (
        f'<marker id="{style}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto"'
        f' markerUnits="userSpaceOnUse"><path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
    )


def _legend(boxes: Sequence[_Box], edges: Sequence[Edge]) -> _Legend:
    """Two lines, for the colours of boxes and the strokes of edges that occur."""
    lines = []
    widths = []
    types = [kind for kind in COLOURS if kind in {box.type for box in boxes}]
    styles = [style for style in STROKES if style in {edge.style for edge in edges}]
    for row, keys in enumerate((types, styles)):
        x, y = 0.0, row * 22.0
        for key in keys:
            if row == 0:
                fill, outline = COLOURS[key]
                lines.append(
                    f'<rect x="{x:.1f}" y="{y}" width="18" height="12" rx="3" fill="{fill}" stroke="{outline}"/>'
                )
            else:
                lines.append(f'<path d="M{x:.1f} {y + 6}h18" stroke-width="1.5" {STROKES[key]}/>')
            label = MEANINGS.get(key, key)
            lines.append(f'<text x="{x + 25:.1f}" y="{y + 10}" font-size="{PLACE:g}" fill="#495057">{label}</text>')
            x += 25 + len(label) * PLACE * CHARACTER + 22
        widths.append(x - 22)
    return _Legend(lines, max(widths), 40.0)


def _table(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
