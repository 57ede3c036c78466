"""Where the boxes and edges of a layered drawing go: the method of Sugiyama, Tagawa and Toda (1981), made small.

An edge that passes a layer gets a slot of its own there, a box without width, and bends only between layers. So boxes
never overlap, and no edge runs through a box.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from statistics import fmean

GAP = 28.0  # pixels between neighbours in a layer
SWEEPS = 24  # enough for orders and places to settle in graphs of tens of nodes


@dataclass(frozen=True)
class Edge:
    """From a box to one in a later layer; edges of one source and one `style` run together while they can."""

    source: str
    target: str
    style: str


@dataclass(frozen=True)
class Spot:
    """A place in a layer: of a box, or where edges of one style from this box pass the layer."""

    name: str
    layer: int
    passing: str | None = None


@dataclass(frozen=True)
class Segment:
    """The part of an edge between two neighbouring layers."""

    upper: Spot
    lower: Spot
    style: str


@dataclass(frozen=True)
class Drawing:
    """Where things go, in pixels.

    Attributes:
        centres: Horizontal, of every spot; from left to right within a layer.
        segments: Of all edges; those that run together are there once.
        width: Of the whole.
    """

    centres: Mapping[Spot, float]
    segments: tuple[Segment, ...]
    width: float


def arrange(layer_of: Mapping[str, int], edges: Sequence[Edge], width_of: Mapping[str, float]) -> Drawing:
    """Place boxes and edges, with few crossings and short, straight edges.

    Args:
        layer_of: The layer of each box, 0 on top.
        edges: Each leads to a later layer.
        width_of: The width of each box, in pixels.
    """
    paths = [_path(edge, layer_of) for edge in edges]
    segments = tuple(
        dict.fromkeys(
            Segment(*ends, edge.style) for edge, path in zip(edges, paths, strict=True) for ends in pairwise(path)
        )
    )
    boxes = [Spot(name, layer) for name, layer in layer_of.items()]
    spots = dict.fromkeys([*boxes, *(spot for path in paths for spot in path)])
    layers = [[spot for spot in spots if spot.layer == layer] for layer in range(1 + max(layer_of.values()))]
    half = {spot: 0.0 if spot.passing else width_of[spot.name] / 2 for spot in spots}

    centres = _centres(_ordered(layers, segments), segments, half)
    left = min(centres[spot] - half[spot] for spot in spots)
    right = max(centres[spot] + half[spot] for spot in spots)
    return Drawing({spot: x - left for spot, x in centres.items()}, segments, right - left)


def _path(edge: Edge, layer_of: Mapping[str, int]) -> list[Spot]:
    first, last = layer_of[edge.source], layer_of[edge.target]
    passed = [Spot(edge.source, layer, edge.style) for layer in range(first + 1, last)]
    return [Spot(edge.source, first), *passed, Spot(edge.target, last)]


def _ordered(layers: list[list[Spot]], segments: Sequence[Segment]) -> list[list[Spot]]:
    """The order that crosses least, of those that sweeps lead to from passing edges on the right and on the left."""
    slots_first = [sorted(row, key=lambda spot: spot.passing is None) for row in layers]
    orders = [*_sweeps(layers, segments), *_sweeps(slots_first, segments)]
    return min(orders, key=lambda order: _crossings(order, segments))


def _sweeps(layers: list[list[Spot]], segments: Sequence[Segment]) -> Iterator[list[list[Spot]]]:
    """Sort layers by the mean position of their neighbours above, then below, and so on; the order after each sweep."""
    above, below = _neighbours(segments)
    for sweep in range(SWEEPS):
        beside, rows = (above, layers) if sweep % 2 == 0 else (below, layers[::-1])
        position = {spot: float(i) for row in rows for i, spot in enumerate(row)}
        swept = []
        for row in rows:
            wanted = {spot: fmean(position[other] for other in beside.get(spot, [spot])) for spot in row}
            swept.append(sorted(row, key=wanted.__getitem__))
            position |= {spot: float(i) for i, spot in enumerate(swept[-1])}
        layers = swept if sweep % 2 == 0 else swept[::-1]
        yield layers


def _crossings(layers: Sequence[Sequence[Spot]], segments: Sequence[Segment]) -> int:
    position = {spot: i for row in layers for i, spot in enumerate(row)}
    return sum(
        (position[a.upper] - position[b.upper]) * (position[a.lower] - position[b.lower]) < 0
        for a, b in combinations(segments, 2)
        if a.upper.layer == b.upper.layer
    )


def _centres(
    layers: Sequence[Sequence[Spot]], segments: Sequence[Segment], half: Mapping[Spot, float]
) -> dict[Spot, float]:
    """Move every spot to the mean of its neighbours, as far as order and gaps allow, until it settles."""
    above, below = _neighbours(segments)
    gaps = {row[0]: [0.0, *(half[a] + GAP + half[b] for a, b in pairwise(row))] for row in layers}
    centres = {spot: x for row in layers for spot, x in zip(row, accumulate(gaps[row[0]]), strict=True)}
    for _ in range(SWEEPS):
        for row in layers:
            joined = ([*above.get(spot, ()), *below.get(spot, ())] or [spot] for spot in row)
            wanted = [fmean(map(centres.__getitem__, others)) for others in joined]
            centres |= zip(row, spread(wanted, gaps[row[0]]), strict=True)
    return centres


def spread(wanted: Sequence[float], gaps: Sequence[float]) -> list[float]:
    """The places nearest to `wanted`, in least squares, that keep the order and `gaps[i]` before place `i`.

    Without the gaps summed so far this is isotonic regression, solved by pooling neighbours that are out of order.
    """
    offsets = list(accumulate(gaps))
    pools: list[list[float]] = []
    for place, offset in zip(wanted, offsets, strict=True):
        pools.append([place - offset])
        while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    level = [fmean(pool) for pool in pools for _ in pool]
    return [place + offset for place, offset in zip(level, offsets, strict=True)]


def _neighbours(segments: Sequence[Segment]) -> tuple[dict[Spot, list[Spot]], dict[Spot, list[Spot]]]:
    """The spots that each spot is joined to in the layer above, and in the layer below."""
    above: dict[Spot, list[Spot]] = {}
    below: dict[Spot, list[Spot]] = {}
    for segment in segments:
        above.setdefault(segment.lower, []).append(segment.upper)
        below.setdefault(segment.upper, []).append(segment.lower)
    return above, below
