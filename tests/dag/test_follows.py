"""The nodes that follow from scores, and the ranks to which dropped rows are sent."""

from __future__ import annotations

from rlflow import PerSample, PerToken, Rollout, node
from rlflow.dag.graph import Graph
from rlflow.dag.planner import plan
from rlflow.dag.tasks import BroadcastRows, Exchange, RunNode
from rlflow.types import Each, Grouped, WithTexts
from rlflow.values.layout import Layout
from tests.dag.modules import GRPO, ROLES, ReMax

GENERATES, TRAINS = Layout((0,), 1), Layout((1, 2), 2, "balanced")
APART = {"actor.rollout": GENERATES, "actor": TRAINS, "reference": TRAINS}


class Scoring(GRPO):
    def rewards(self, rollout: WithTexts) -> PerSample: ...


def follows(module: object) -> dict[str, tuple[str, ...]]:
    return {node.id: node.follows for node in Graph.read(module, ROLES, drops=True).order if node.follows}


def test_without_such_a_reward_no_node_follows() -> None:
    assert not any(node.follows for node in Graph.read(Scoring(), ROLES).order)


def test_nodes_follow_through_what_they_read() -> None:
    assert follows(Scoring()) == {"advantages": ("rollout",), "actor_loss": ("rollout",)}


def test_a_loss_that_reads_no_score_sees_all_rows() -> None:
    class Two(Scoring):
        @node(role="reference", type="train")
        def reference_loss(self, rollout: Rollout) -> PerToken: ...

    assert "reference_loss" not in follows(Two())


def test_scores_of_other_samples_of_a_prompt_are_followed_too() -> None:
    class Greedy(ReMax):
        def rewards(self, rollout: WithTexts) -> PerSample: ...

        def greedy_rewards(self, greedy: WithTexts) -> PerSample: ...

    assert set(follows(Greedy())["actor_loss"]) == {"rollout", "greedy"}


def test_a_node_of_rows_above_follows_the_scores_below() -> None:
    class Above(Scoring):
        @node
        def solved(self, batch: Grouped, rewards: Each[PerSample]) -> PerSample: ...

    assert follows(Above())["solved"] == ("rollout",)


def test_ranks_that_train_are_sent_the_rows_after_they_were_scored() -> None:
    tasks = plan(Graph.read(Scoring(), ROLES, drops=True), APART, world_size=3).tasks
    tells = [place for place, task in enumerate(tasks) if isinstance(task, BroadcastRows) and task.value == "rollout"]
    (scored,) = [place for place, task in enumerate(tasks) if isinstance(task, RunNode) and task.node_id == "rewards"]
    trained = max(place for place, task in enumerate(tasks) if isinstance(task, Exchange))
    assert tells[-1] > scored
    assert tells[-1] < trained
    plain = plan(Graph.read(Scoring(), ROLES), APART, world_size=3).tasks
    assert len(tells) == 1 + sum(isinstance(task, BroadcastRows) and task.value == "rollout" for task in plain)


def test_where_all_ranks_score_nothing_is_sent_again() -> None:
    placed = dict.fromkeys(APART, Layout((0, 1), 2))
    graphs = (Graph.read(Scoring(), ROLES, drops=drops) for drops in (False, True))
    one, other = (str(plan(graph, placed, world_size=2)) for graph in graphs)
    assert one == other
