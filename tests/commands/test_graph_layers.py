"""The places of a layered drawing."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.commands.graph_layers import GAP, Drawing, Edge, Spot, arrange, spread


def crossings(drawing: Drawing) -> int:
    """Pairs of segments between the same two layers that cross."""
    x = drawing.centres
    pairs = [(a, b) for a, b in combinations(drawing.segments, 2) if a.upper.layer == b.upper.layer]
    return sum((x[a.upper] - x[b.upper]) * (x[a.lower] - x[b.lower]) < 0 for a, b in pairs)


def test_places_that_are_too_close_move_apart_by_as_little_as_possible() -> None:
    # both want 0 and must be 10 apart: -5 and 5 have the least sum of squares; the third is far enough already
    assert spread([0.0, 0.0, 100.0], [0.0, 10.0, 10.0]) == [-5.0, 5.0, 100.0]


def test_a_push_moves_all_that_touch() -> None:
    # without gaps they want 0, -10, -20, so all three share their mean, -10: -10, 0, 10
    assert spread([0.0, 0.0, 0.0], [0.0, 10.0, 10.0]) == [-10.0, 0.0, 10.0]


def test_edges_that_need_not_cross_do_not() -> None:
    layers = {"a": 0, "b": 0, "c": 1, "d": 1}
    drawing = arrange(layers, [Edge("a", "d", "-"), Edge("b", "c", "-")], dict.fromkeys(layers, 50.0))
    assert crossings(drawing) == 0


def test_a_long_edge_passes_on_the_side_where_it_crosses_nothing() -> None:
    layers = {"a": 0, "b": 0, "c": 1, "d": 1, "e": 2, "f": 3}
    joined = ["ac", "bd", "ce", "de", "ef", "af"]  # from `a` to `f` only the left side is free
    drawing = arrange(layers, [Edge(*pair, "-") for pair in joined], dict.fromkeys(layers, 50.0))
    assert crossings(drawing) == 0


def test_edges_of_one_source_and_style_run_together() -> None:
    layers = {"a": 0, "b": 1, "c": 2, "d": 2}
    edges = [Edge("a", "b", "-"), Edge("b", "c", "-"), Edge("a", "c", "-"), Edge("a", "d", "-")]
    drawing = arrange(layers, edges, dict.fromkeys(layers, 50.0))
    assert [spot for spot in drawing.centres if spot.passing] == [Spot("a", 1, "-")]


def test_a_chain_is_straight() -> None:
    layers = {"a": 0, "b": 1, "c": 2}
    drawing = arrange(layers, [Edge("a", "b", "-"), Edge("b", "c", "-")], {"a": 30.0, "b": 90.0, "c": 50.0})
    assert list(drawing.centres.values()) == [45.0, 45.0, 45.0]
    assert drawing.width == 90.0


@st.composite
def graphs(draw: st.DrawFn) -> tuple[dict[str, int], list[Edge], dict[str, float]]:
    """Boxes in layers without a gap, edges downwards in two styles."""
    depth = draw(st.integers(1, 5))
    layers = [*range(depth), *draw(st.lists(st.integers(0, depth - 1), max_size=8))]
    layer_of = {f"n{i}": layer for i, layer in enumerate(layers)}
    down = [(a, b) for a in layer_of for b in layer_of if layer_of[a] < layer_of[b]]
    chosen = draw(st.lists(st.sampled_from(down), unique=True)) if down else []
    edges = [Edge(a, b, draw(st.sampled_from(("solid", "dashed")))) for a, b in chosen]
    return layer_of, edges, {name: draw(st.floats(40, 200)) for name in layer_of}


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_neighbours_in_a_layer_keep_their_distance(graph: tuple[dict[str, int], list[Edge], dict[str, float]]) -> None:
    layer_of, edges, width_of = graph
    drawing = arrange(layer_of, edges, width_of)
    for layer in set(layer_of.values()):
        row = sorted(
            ((x, spot) for spot, x in drawing.centres.items() if spot.layer == layer), key=lambda pair: pair[0]
        )
        for (x1, left), (x2, right) in pairwise(row):
            widths = [0.0 if spot.passing else width_of[spot.name] for spot in (left, right)]
            assert x2 - x1 >= sum(widths) / 2 + GAP - 1e-6


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_nothing_leaves_the_drawing(graph: tuple[dict[str, int], list[Edge], dict[str, float]]) -> None:
    layer_of, edges, width_of = graph
    drawing = arrange(layer_of, edges, width_of)
    half = {spot: 0.0 if spot.passing else width_of[spot.name] / 2 for spot in drawing.centres}
    assert min(x - half[spot] for spot, x in drawing.centres.items()) == pytest.approx(0.0, abs=1e-6)
    assert max(x + half[spot] for spot, x in drawing.centres.items()) == pytest.approx(drawing.width)
