"""Curves and the graph of a run as SVG that a page colours: classes instead of colours, so that it may be dark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from rlflow.dag.drawing import TYPES
from rlflow.dag.graph import Graph
from rlflow.dag.node import BATCH
from rlflow.dag.planner import Plan
from rlflow.dag.tasks import Exchange, rank_ranges

MOST_POINTS = 400  # of a drawn curve
WIDTH, HEIGHT = 420, 200
LEFT, RIGHT, TOP, BOTTOM = 52, 8, 8, 24  # margins around the curves
SERIES = 8  # colours that the page has
Z = 1.96  # of a 95% interval


@dataclass(frozen=True)
class Curve:
    """A metric over steps.

    Attributes:
        name: Name in the legend.
        points: Step and value.
        colour: Number of its colour.
        dash: Number of its kind of line; 0 is solid.
        prompts: Number of prompts that each value is a share of, for its interval; None for none.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    dash: int = 0
    prompts: int | None = None


def chart(title: str, curves: Sequence[Curve]) -> str:
    """A panel: title, curves over a grid, and a legend with last values."""
    drawn = [(curve, thinned(curve.points)) for curve in curves]
    bands = {
        curve.name: [wilson(y, curve.prompts) for _, y in points]
        for curve, points in drawn
        if curve.prompts and all(0 <= y <= 1 for _, y in points)  # a module may log its own `val/accuracy` in percent
    }
    steps = [x for _, points in drawn for x, _ in points]
    values = [y for _, points in drawn for _, y in points] + [
        end for band in bands.values() for of in band for end in of
    ]
    x0, x1 = min(steps), max(max(steps), min(steps) + 1)
    marks = ticks(min(values), max(values))
    y0, y1 = min(marks[0], min(values)), max(marks[-1], max(values))

    def place(x: float, y: float) -> str:
        across = LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        return f"{across:.1f},{_height(y, y0, y1):.1f}"

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for y in marks:
        at = f"{_height(y, y0, y1):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{LEFT - 4}" y="{at}" text-anchor="end" dominant-baseline="middle">{short(y)}</text>')
    for x, anchor in ((x0, "start"), (x1, "end")):
        at = place(x, y0).partition(",")[0]
        parts.append(f'<text x="{at}" y="{HEIGHT - 6}" text-anchor="{anchor}">{"step " * (x == x0)}{x:g}</text>')
    for curve, points in drawn:
        if curve.name in bands:
            sides = list(zip(points, bands[curve.name], strict=True))
            round_it = [place(x, high) for (x, _), (_, high) in sides]
            round_it += [place(x, low) for (x, _), (low, _) in reversed(sides)]
            parts.append(f'<polygon class="band f{curve.colour % SERIES}" points="{" ".join(round_it)}"/>')
        line = f"s{curve.colour % SERIES} d{curve.dash}"
        parts.append(f'<polyline class="{line}" points="{" ".join(place(x, y) for x, y in points)}"/>')
        if len(points) < 30:
            dots = (place(x, y).split(",") for x, y in points)
            parts += [f'<circle class="f{curve.colour % SERIES}" cx="{x}" cy="{y}" r="2.2"/>' for x, y in dots]
    parts.append("</svg>")
    legend = "".join(_legend(curve) for curve in curves)
    return f"<figure><figcaption>{escape(title)}</figcaption>{''.join(parts)}<ul>{legend}</ul></figure>"


def _height(y: float, y0: float, y1: float) -> float:
    return HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)


def _legend(curve: Curve) -> str:
    step, value = curve.points[-1]
    key = (
        f'<svg class="key" viewBox="0 0 20 8"><path class="s{curve.colour % SERIES} d{curve.dash}" d="M0 4H20"/></svg>'
    )
    return f"<li>{key} {escape(curve.name)} <b>{short(value)}</b> at {step:g}</li>"


def short(value: float) -> str:
    """Four digits, such as `0.2003`, `128.5k` or `5.6e-07`."""
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(unit, 1e4):  # thousands are read better without a letter
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}"


def in_bytes(number: float) -> str:
    """Four digits, such as `512 B` or `128.5 kB`; a kB is 1,000 bytes."""
    text = short(number)
    return f"{text[:-1]} {text[-1]}B" if text[-1].isalpha() else f"{text} B"


def thinned(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most `most` points: the ends, and the least and the largest of even parts between, so that spikes stay."""
    if len(points) <= most:
        return list(points)
    inner, parts = points[1:-1], (most - 2) // 2
    chosen = [points[0]]
    for part in range(parts):
        within = inner[part * len(inner) // parts : (part + 1) * len(inner) // parts]
        ends = {min(within, key=lambda point: point[1]), max(within, key=lambda point: point[1])}
        chosen += sorted(ends)
    return [*chosen, points[-1]]


def wilson(share: float, prompts: int) -> tuple[float, float]:
    """The 95% interval of a share of `prompts` independent prompts (Wilson 1927, equation of the score interval)."""
    middle = (share + Z**2 / (2 * prompts)) / (1 + Z**2 / prompts)
    half = Z / (1 + Z**2 / prompts) * math.sqrt(share * (1 - share) / prompts + Z**2 / (4 * prompts**2))
    return middle - half, middle + half


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """At most `most` + 1 round numbers from `low` or a little less to `high` or a little more."""
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        low, high = low - (abs(low) / 10 or 0.5), high + (abs(high) / 10 or 0.5)
    rough = (high - low) / most
    size = 10.0 ** math.floor(math.log10(rough))
    unit = next(each * size for each in (1, 2, 5, 10, 20) if each * size >= rough)
    first, last = math.floor(low / unit + 1e-9), math.ceil(high / unit - 1e-9)
    if last - first > most:  # both ends were rounded outward
        return ticks(first * unit, last * unit, most - 1)
    return [number * unit for number in range(first, last + 1)]


BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y = 190, 58, 34, 44
LABEL_WIDTH, LABEL_HEIGHT = 64, 13


def graph_drawing(graph: Graph, plan: Plan, sent: Mapping[str, int]) -> str:
    """The nodes in rows, each below all that it reads; a dashed edge is exchanged between ranks.

    Args:
        graph: Graph of the run.
        plan: Plan of the graph.
        sent: Bytes that were sent in each exchange, by its line in the plan.
    """
    layouts = plan.layouts()
    depth = {BATCH: 0}
    for node in graph.order:
        depth[node.id] = 1 + max((depth.get(name, 0) for name in node.needs), default=0)
    rows: dict[int, list[str]] = {}
    for name, row in depth.items():
        rows.setdefault(row, []).append(name)
    widest = max(map(len, rows.values()))
    width = widest * (BOX_WIDTH + GAP_X) + GAP_X
    height = (max(rows) + 1) * (BOX_HEIGHT + GAP_Y) - GAP_Y + 4
    places = {
        name: ((number + 0.5) * width / len(names), row * (BOX_HEIGHT + GAP_Y) + 2)
        for row, names in rows.items()
        for number, name in enumerate(names)
    }
    out = _reach(height) - BOX_WIDTH / 2
    parts = list(_edges(graph, plan, places, sent))
    for name, (x, y) in places.items():
        kind = "dataset" if name == BATCH else graph.nodes[name].kind
        lines = [name, "DATASET" if name == BATCH else f"{graph.nodes[name].models} {TYPES[graph.nodes[name].kind]}"]
        if name in layouts:
            lines.append(f"{rank_ranges(layouts[name].ranks)}, {layouts[name].shard_by}")
        left = x - BOX_WIDTH / 2
        parts.append(
            f'<rect class="box {kind}" x="{left:g}" y="{y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5"/>'
        )
        for number, line in enumerate(lines):
            style = ' class="name"' * (number == 0)
            at = y + 17 + 16 * number
            parts.append(f'<text{style} x="{x:g}" y="{at:g}" text-anchor="middle">{escape(line.strip())}</text>')
    across = width + out
    return f'<svg class="graph" viewBox="0 0 {across:g} {height:g}" style="width:{across:g}px">{"".join(parts)}</svg>'


def _edges(
    graph: Graph, plan: Plan, places: Mapping[str, tuple[float, float]], sent: Mapping[str, int]
) -> Iterator[str]:
    """The edges, each with a label of what it carried, where no box and no other label is."""
    first: dict[Exchange, str] = {}
    taken = [(x, y + BOX_HEIGHT / 2, (BOX_WIDTH + LABEL_WIDTH) / 2, BOX_HEIGHT / 2) for x, y in places.values()]
    labels = []
    for node in graph.order:
        for name in node.needs:
            if name not in places:
                continue
            exchange = plan.exchange(name, node, graph.seen_in(node, name)) if name in node.reads else None
            label = "local" if name in node.reads else "trained"
            if exchange is not None:
                reader = first.setdefault(exchange, node.id)
                number = sent.get(str(exchange))
                label = f"with {reader}" if reader != node.id else "" if number is None else in_bytes(number)
            (x0, y0), (x1, y1) = places[name], places[node.id]
            if y1 - y0 > BOX_HEIGHT + GAP_Y:  # past the boxes between
                out = max(x0, x1) + _reach(y1 - y0)
                ends = (x0 + BOX_WIDTH / 2, y0 + 40), (out, y0 + 50), (out, y1 + 10), (x1 + BOX_WIDTH / 2, y1 + 20)
            else:
                y0 += BOX_HEIGHT
                ends = (x0, y0), (x0, (y0 + y1) / 2), (x1, (y0 + y1) / 2), (x1, y1)
            path = "M{:g} {:g}C{:g} {:g} {:g} {:g} {:g} {:g}".format(*(end for point in ends for end in point))
            said = f"<title>{escape(str(exchange))}</title>" if exchange is not None else ""
            yield f'<path class="edge{" sent" * bool(said)}" d="{path}">{said}</path>'
            along = [_at(ends, part / 20) for part in (10, 8, 12, 6, 14, 5, 15)]
            x, y = next((each for each in along if _is_free(each, taken)), along[0])
            taken.append((x, y, LABEL_WIDTH, LABEL_HEIGHT))
            labels.append(f'<text class="carried" x="{x:g}" y="{y:g}" text-anchor="middle">{escape(label)}</text>')
    yield from labels  # above all edges


def _at(ends: Sequence[tuple[float, float]], part: float) -> tuple[float, float]:
    """A point of a cubic Bezier curve, `part` of its parameter from 0 to 1."""
    weights = [(1 - part) ** 3, 3 * part * (1 - part) ** 2, 3 * part**2 * (1 - part), part**3]
    x, y = (sum(weight * end[axis] for weight, end in zip(weights, ends, strict=True)) for axis in (0, 1))
    return x, y


def _is_free(place: tuple[float, float], taken: Sequence[tuple[float, float, float, float]]) -> bool:
    """Whether a label has room at a place: `taken` has the middles of labels and boxes, and the room around them."""
    return not any(abs(place[0] - x) < across and abs(place[1] - y) < down for x, y, across, down in taken)


def _reach(height: float) -> float:
    """Distance by which an edge past other boxes is bent away from the middle of a box."""
    return BOX_WIDTH / 2 + 40 + height / 4
