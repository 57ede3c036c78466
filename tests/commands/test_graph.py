"""A graph as a table and in Mermaid."""

from __future__ import annotations

from rlflow.dag.drawing import mermaid, text
from rlflow.dag.graph import Graph
from rlflow.dag.node import node
from rlflow.dag.planner import Plan, plan
from rlflow.values.batch import Batch
from rlflow.values.column_kinds import PerToken
from rlflow.values.layout import Layout
from tests.dag.modules import GRPO, SFT, Filtered, ReMax


def planned(module: object) -> tuple[Graph, Plan]:
    """The graph and its plan on two ranks, training and scoring balanced."""
    graph = Graph.read(module, ("actor", "reference", "critic"), policies=("actor", "reference"))
    balanced = Layout((0, 1), 2, "balanced")
    layouts = {"actor.rollout": Layout((0, 1), 2), "actor": balanced, "reference": balanced, "critic": balanced}
    return graph, plan(graph, layouts, world_size=2)


class Distilled(SFT):
    @node(role="actor", type="train", uses=("teacher", "judge"))
    def actor_loss(self, batch: Batch) -> PerToken: ...


def test_the_models_that_a_node_uses_are_listed_with_its_role() -> None:
    graph = Graph.read(Distilled(), ("actor", "teacher", "judge"))
    layout = Layout((0,), 1, "balanced")
    planned = plan(graph, dict.fromkeys(("actor", "teacher", "judge"), layout), world_size=1)
    assert "actor, uses teacher, judge  MODEL_TRAIN" in text(graph, planned, rank=0)
    assert "actor, uses teacher, judge · MODEL_TRAIN" in mermaid(graph, planned)


def test_the_text_shows_the_table_of_nodes_and_the_plan_of_a_rank() -> None:
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
        "  2  resample  useful: ranks 0-1; keeps rollout, rewards; repeats",
        "  3    load      batch: ranks 0-1, 2 shards, groups",
        "  4    run       rollout: ranks 0-1, 2 shards, groups; frees batch",
        "  5    run       rewards: ranks 0-1, 2 shards, groups",
    ]


def test_mermaid_frames_what_repeats() -> None:
    lines = [line.split("[")[0].strip() for line in mermaid(*planned(Filtered())).splitlines()]
    assert lines[1:7] == ["subgraph repeats", "node_batch", "node_rollout", "node_rewards", "node_useful", "end"]
    assert "repeats" not in mermaid(*planned(GRPO()))


def test_mermaid_has_boxes_edges_and_colours() -> None:
    assert mermaid(*planned(SFT())).splitlines() == [
        "flowchart TD",
        '    node_batch["<b>batch</b><br/>DATASET<br/>ranks 0-1, groups"]:::DATASET',
        '    node_actor_loss["<b>actor_loss</b><br/>actor · MODEL_TRAIN<br/>ranks 0-1, balanced"]:::MODEL_TRAIN',
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
