"""A graph for the eye: the table, Mermaid, and the picture."""

from __future__ import annotations

import re
from itertools import combinations
from xml.etree import ElementTree

import pytest

from rlflow.commands.graph_drawing import mermaid, svg, text
from rlflow.dag.graph import Graph
from rlflow.dag.node import node
from rlflow.dag.planner import Plan, plan
from rlflow.values.batch import Batch
from rlflow.values.cuts import PerSample, PerToken
from rlflow.values.layout import Layout
from rlflow.values.rollout import Rollout
from tests.dag.modules import GRPO, SFT, Filtered, ReMax

Rectangle = tuple[float, float, float, float]  # left, top, right, bottom


class PPO(GRPO):
    """A larger graph: long edges, two train nodes."""

    @node(role="critic")
    def values(self, rollout: Rollout) -> PerToken: ...

    @node
    def kl_penalty(self, old_logprobs: PerToken, ref_logprobs: PerToken) -> PerToken: ...

    @node
    def returns(self, rewards: PerSample, kl_penalty: PerToken, values: PerToken) -> PerToken: ...

    def advantages(self, rollout: Rollout, values: PerToken, returns: PerToken) -> PerSample: ...

    @node(role="critic", type="train")
    def critic_loss(self, rollout: Rollout, values: PerToken, returns: PerToken) -> PerToken: ...


def planned(module: object) -> tuple[Graph, Plan]:
    """The graph and its plan on two ranks, training and scoring balanced."""
    graph = Graph.read(module, ("actor", "reference", "critic"), policies=("actor", "reference"))
    balanced = Layout((0, 1), 2, "balanced")
    layouts = {"actor.rollout": Layout((0, 1), 2), "actor": balanced, "reference": balanced, "critic": balanced}
    return graph, plan(graph, layouts, world_size=2)


class Distilled(SFT):
    @node(role="actor", type="train", uses=("teacher", "judge"))
    def actor_loss(self, batch: Batch) -> PerToken: ...


def test_the_models_that_a_node_uses_stand_beside_its_role() -> None:
    graph = Graph.read(Distilled(), ("actor", "teacher", "judge"))
    layout = Layout((0,), 1, "balanced")
    planned = plan(graph, dict.fromkeys(("actor", "teacher", "judge"), layout), world_size=1)
    assert "actor, uses teacher, judge  MODEL_TRAIN" in text(graph, planned, rank=0)
    for drawing in (mermaid(graph, planned), svg(graph, planned)):
        assert "actor, uses teacher, judge · MODEL_TRAIN" in drawing


def test_the_table_and_the_plan_of_a_rank() -> None:
    graph = Graph.read(SFT(), ("actor",))
    steps = plan(graph, {"actor": Layout((1,), 1, "balanced")}, world_size=2)
    table = [
        "node        role   type         returns   rows of  reads  written in",
        f"actor_loss  actor  MODEL_TRAIN  PerToken  batch    batch  {graph.nodes['actor_loss'].place}",
        "",
        "node        reads  as     fields",
        "actor_loss  batch  Batch  prompt_ids, response_ids, loss_mask, lengths, path",
        "",
    ]
    assert text(graph, steps, rank=0).splitlines() == [
        *table,
        f"plan of rank 0, digest {steps.digest[:12]}:",
        "  1  reduce    metrics: ranks 0-1",
    ]
    assert text(graph, steps, rank=1).splitlines() == [
        *table,
        f"plan of rank 1, digest {steps.digest[:12]}:",
        "  1  load      batch: rank 1, 1 shard, groups",
        "  2  exchange  batch: rank 1, 1 shard, groups -> rank 1, 1 shard, balanced; rows of batch",
        "  3  train     actor_loss: rank 1, 1 shard, balanced; frees batch",
        "  4  reduce    metrics: ranks 0-1",
    ]


def test_the_table_numbers_the_tasks_that_repeat_too() -> None:
    lines = text(*planned(Filtered()), rank=0).splitlines()
    assert lines[-12:-8] == [
        "  2  fill      useful: ranks 0-1; keeps rollout, rewards; repeats",
        "  3    load      batch: ranks 0-1, 2 shards, groups",
        "  4    run       rollout: ranks 0-1, 2 shards, groups; frees batch",
        "  5    run       rewards: ranks 0-1, 2 shards, groups",
    ]


def test_mermaid_frames_what_repeats() -> None:
    lines = [line.split("[")[0].strip() for line in mermaid(*planned(Filtered())).splitlines()]
    assert lines[1:7] == ["subgraph repeats", "node_batch", "node_rollout", "node_rewards", "node_useful", "end"]


def test_the_picture_has_what_repeats_on_a_band_of_its_own() -> None:
    picture = svg(*planned(Filtered()))
    top, height = re.findall(r'<rect x="8" y="(\d+)" width="\d+" height="(\d+)"', picture)[0]
    boxes, _ = boxes_and_paths(picture)
    inside = {name for name, (_, _, _, bottom) in boxes.items() if bottom < int(top) + int(height)}
    assert inside == {"batch", "rollout", "rewards", "useful"}
    assert "repeats" not in svg(*planned(GRPO()))


def test_mermaid_has_boxes_edges_and_colours() -> None:
    assert mermaid(*planned(SFT())).splitlines() == [
        "flowchart TD",
        '    node_batch["<b>batch</b><br/>DATASET"]:::DATASET',
        '    node_actor_loss["<b>actor_loss</b><br/>actor · MODEL_TRAIN"]:::MODEL_TRAIN',
        "    node_batch -. exchange .-> node_actor_loss",
        "    classDef DATASET fill:#f1f3f5,stroke:#868e96,color:#212529",
        "    classDef MODEL_TRAIN fill:#fff4e6,stroke:#e8590c,color:#212529",
    ]


def test_mermaid_dots_the_edges_that_are_exchanged() -> None:
    dotted = [line.split() for line in mermaid(*planned(ReMax())).splitlines() if "exchange" in line]
    assert [(line[0], line[-1]) for line in dotted] == [
        ("node_rollout", "node_old_logprobs"),  # groups to balanced
        ("node_greedy_rewards", "node_baseline"),  # all rows below each prompt
        ("node_baseline", "node_advantages"),  # prompts' value beside samples
        ("node_rollout", "node_actor_loss"),
        ("node_advantages", "node_actor_loss"),
    ]


def boxes_and_paths(picture: str) -> tuple[dict[str, Rectangle], list[list[tuple[float, float]]]]:
    """Where the boxes of a picture lie, by name, and points along its edges."""
    namespace = {"svg": "http://www.w3.org/2000/svg"}
    drawing = ElementTree.fromstring(picture).findall("svg:g", namespace)[0]
    boxes = {}
    for group in drawing.findall("svg:g", namespace):
        x, y = map(float, re.findall(r"[-\d.]+", group.attrib["transform"]))
        rectangle = group.find("svg:rect", namespace)
        name = group.find("svg:text", namespace)
        assert rectangle is not None
        assert name is not None
        left, width, height = (float(rectangle.attrib[key]) for key in ("x", "width", "height"))
        boxes[str(name.text)] = (x + left, y, x + left + width, y + height)
    return boxes, [points(path.attrib["d"]) for path in drawing.findall("svg:path", namespace)]


def points(path: str) -> list[tuple[float, float]]:
    """Points along `M x y C x y x y x y`, and along `V y` where the path has one."""
    x0, y0, x1, y1, x2, y2, x3, y3, *rest = map(float, re.findall(r"-?[\d.]+", path))
    curve = []
    for step in range(101):
        t = step / 100
        a, b, c, d = (1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3
        curve.append((a * x0 + b * x1 + c * x2 + d * x3, a * y0 + b * y1 + c * y2 + d * y3))
    return curve + [(x3, y3 + (end - y3) * step / 100) for end in rest for step in range(101)]


@pytest.mark.parametrize("module", [GRPO, ReMax, SFT, PPO, Filtered])
def test_no_two_boxes_overlap(module: type) -> None:
    graph, steps = planned(module())
    boxes, _ = boxes_and_paths(svg(graph, steps))
    assert boxes.keys() == {"batch", *graph.nodes}
    for (left, top, right, bottom), (left2, top2, right2, bottom2) in combinations(boxes.values(), 2):
        assert right < left2 or right2 < left or bottom < top2 or bottom2 < top


@pytest.mark.parametrize("module", [GRPO, ReMax, SFT, PPO, Filtered])
def test_no_edge_runs_through_a_box(module: type) -> None:
    boxes, paths = boxes_and_paths(svg(*planned(module())))
    assert paths
    for path in paths:
        for x, y in path:
            assert not any(left < x < right and top < y < bottom for left, top, right, bottom in boxes.values())


def test_the_words_of_a_box_fit_into_it() -> None:
    for group in ElementTree.fromstring(svg(*planned(PPO()))).iter("{http://www.w3.org/2000/svg}g"):
        rectangle = group.find("{http://www.w3.org/2000/svg}rect[@rx='8']")
        for line in group.findall("{http://www.w3.org/2000/svg}text") if rectangle is not None else ():
            # 0.602 of the font's size is the width of a character of DejaVu Sans Mono, the widest of the fonts named
            width = len(str(line.text)) * float(line.attrib["font-size"]) * 0.602
            assert rectangle is not None
            assert width <= float(rectangle.attrib["width"]) - 20


def test_every_edge_ends_in_an_arrow_and_exchanges_are_dashed() -> None:
    graph, steps = planned(ReMax())
    arrows = re.findall(r'<path [^>]*marker-end="url\(#(\w+)\)"', svg(graph, steps))
    assert len(arrows) == sum(len(step.reads) for step in graph.order)
    assert arrows.count("exchanged") == 5  # as in the Mermaid test
