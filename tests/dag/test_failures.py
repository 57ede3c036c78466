"""Nodes that tell of samples which a reward failed on: where they stand, and who is told."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rlflow import Each, Pairs, PerSample, PerToken, Rollout, node
from rlflow.dag.graph import Graph, GraphError
from rlflow.dag.planner import plan
from rlflow.dag.tasks import Exchange, RunNode, TrainNode
from rlflow.types import Grouped, Grown, Written
from rlflow.values.batch import Batch
from rlflow.values.layout import Layout
from rlflow.values.path import RowPath
from tests.dag.modules import GRPO, ROLES, ReMax

GENERATES, TRAINS = Layout((0,), 1), Layout((1, 2), 2, "balanced")
APART = {"actor.rollout": GENERATES, "actor": TRAINS, "reference": TRAINS}


class Scoring(GRPO):
    def rewards(self, rollout: Written) -> PerSample: ...


def read(module: object) -> Graph:
    return Graph.read(module, ROLES, leaves_out=True)


def told(graph: Graph) -> dict[str, tuple[str, ...]]:
    return {node.id: node.told for node in graph.order if node.told}


def test_without_such_a_reward_nothing_is_added() -> None:
    assert told(Graph.read(Scoring(), ROLES)) == {}
    assert "rewards_failed" not in Graph.read(Scoring(), ROLES).nodes


def test_what_a_scorer_failed_on_is_told_of_beside_it_and_goes_where_rows_are_trained() -> None:
    graph = read(Scoring())
    assert told(graph) == {"actor_loss": ("rewards_failed",)}
    planned = plan(graph, APART, world_size=3, max_staleness=1)
    tasks = [task for task in planned.tasks if "rewards_failed" in str(task)]
    assert tasks == [
        RunNode("rewards_failed", GENERATES, frees=("rewards",)),
        TrainNode(
            "actor_loss",
            TRAINS,
            frees=("rollout", "advantages", "old_logprobs", "ref_logprobs", "rewards_failed"),
            lag=1,
        ),
        Exchange("rewards_failed", "rollout", GENERATES, TRAINS),
    ]


def test_a_filter_hears_of_it_so_that_it_is_drawn_anew_with_the_scores() -> None:
    class Filtering(Scoring):
        @node(type="filter")
        def useful(self, rewards: PerSample) -> PerSample: ...

    graph = read(Filtering())
    assert [node.id for node in graph.block] == ["rollout", "rewards", "rewards_failed", "useful"]
    assert told(graph) == {"useful": ("rewards_failed",), "actor_loss": ("rewards_failed",)}


def test_only_what_follows_from_the_scores_is_told() -> None:
    class Two(Scoring):
        @node(role="reference", type="train")
        def reference_loss(self, rollout: Rollout) -> PerToken: ...

    assert told(read(Two())) == {"actor_loss": ("rewards_failed",)}


def test_scores_of_other_samples_of_a_prompt_are_told_of_by_prompt() -> None:
    class Greedy(ReMax):
        def rewards(self, rollout: Written) -> PerSample: ...

        def greedy_rewards(self, greedy: Written) -> PerSample: ...

    graph = read(Greedy())
    assert told(graph) == {"actor_loss": ("rewards_failed", "greedy_rewards_failed_in_batch")}
    assert graph.nodes["greedy_rewards_failed_in_batch"].inside == "batch"
    assert graph.nodes["greedy_rewards_failed_in_batch"].each == ("greedy_rewards_failed",)


def test_a_node_may_ask_for_it_and_gets_its_default_where_nothing_is_left_out() -> None:
    class Asking(Scoring):
        def advantages(self, rewards: PerSample, rewards_failed: PerSample | None = None) -> PerSample: ...

    assert read(Asking()).nodes["advantages"].reads == ("rewards", "rewards_failed")
    assert Graph.read(Asking(), ROLES).nodes["advantages"].reads == ("rewards",)


def test_a_value_that_follows_from_scores_stands_for_them() -> None:
    class Shaped(Scoring):
        @node
        def scores(self, rollout: Written) -> PerSample: ...

        def rewards(self, rollout: Rollout, scores: PerSample) -> PerSample: ...  # type: ignore[override]

        def advantages(self, rewards: PerSample, rewards_failed: PerSample | None = None) -> PerSample: ...

    graph = read(Shaped())
    assert graph.nodes["rewards_failed"].reads == ("scores_failed",)
    assert graph.nodes["advantages"].reads == ("rewards", "rewards_failed")
    assert told(graph) == {"actor_loss": ("scores_failed",)}
    assert "rewards_failed" not in Graph.read(Shaped(), ROLES).nodes


def test_what_is_asked_of_a_value_that_follows_from_no_score_has_its_default() -> None:
    class Asking(Scoring):
        def advantages(self, rewards: PerSample, ref_logprobs_failed: PerSample | None = None) -> PerSample: ...

    assert read(Asking()).nodes["advantages"].reads == ("rewards",)


def test_a_loss_that_asks_for_it_is_called_with_it() -> None:
    class Asking(Scoring):
        def actor_loss(  # type: ignore[override]
            self, rollout: Rollout, advantages: PerSample, rewards_failed: PerSample | None = None
        ) -> PerToken: ...

    graph = read(Asking())
    assert graph.nodes["actor_loss"].reads == ("rollout", "advantages", "rewards_failed")
    assert told(graph) == {}


def refused(module: object) -> list[str]:
    with pytest.raises(GraphError) as error:
        read(module)
    return [problem.message for problem in error.value.problems]


def test_its_name_is_taken() -> None:
    class Taken(Scoring):
        @node
        def rewards_failed(self, rollout: Rollout) -> PerSample: ...

    assert refused(Taken()) == [
        "`rewards_failed` is what tells of samples that `rewards` fails to score. Rename the node"
    ]


def test_pairs_of_samples_are_told_of_by_prompt() -> None:
    class Pairing(GRPO):
        def rewards(self, rollout: Written) -> PerSample: ...

        @node
        def pairs(self, batch: Grouped, rollout: Each[Rollout], advantages: Each[PerSample]) -> Grown[Pairs]: ...

        def actor_loss(self, pairs: Pairs) -> PerSample: ...  # type: ignore[override]

    assert told(read(Pairing())) == {"actor_loss": ("rewards_failed_in_batch",)}


@dataclass(frozen=True)
class Hints:
    """Rows that nothing says the groups of."""

    path: RowPath
    worth: PerSample


def test_a_node_above_may_ask_for_each_of_them() -> None:
    class Asking(Scoring):
        @node
        def solved(
            self, batch: Grouped, rewards: Each[PerSample], rewards_failed: Each[PerSample] | None = None
        ) -> PerSample: ...

    assert read(Asking()).nodes["solved"].each == ("rewards", "rewards_failed")
    assert read(Asking()).nodes["solved"].inside == "batch"
    assert Graph.read(Asking(), ROLES).nodes["solved"].each == ("rewards",)


def test_the_name_of_what_tells_of_other_rows_is_taken() -> None:
    class Taken(GRPO):
        def rewards(self, rollout: Written) -> PerSample: ...

        @node
        def rewards_failed_in_batch(self, batch: Grouped) -> PerSample: ...

        @node
        def pairs(self, batch: Grouped, rollout: Each[Rollout], advantages: Each[PerSample]) -> Grown[Pairs]: ...

        def actor_loss(self, pairs: Pairs) -> PerSample: ...  # type: ignore[override]

    assert refused(Taken()) == [
        "`rewards_failed_in_batch` is what tells of samples that `rewards` fails to score. Rename the node"
    ]


def test_scores_that_reach_a_loss_through_rows_without_groups_are_refused() -> None:
    class Apart(GRPO):
        ref_logprobs = old_logprobs = None

        @node
        def hints(self, batch: Batch) -> Grown[Hints]: ...

        def rollout(self, hints: Hints) -> Rollout: ...  # type: ignore[override]

        @node(role="rollout")
        def other(self, hints: Hints) -> Rollout: ...

        def rewards(self, rollout: Written) -> PerSample: ...

        @node
        def worth(self, hints: Hints, rewards: Each[PerSample]) -> PerSample: ...

        def advantages(self, other: Rollout, worth: PerSample) -> PerSample: ...  # type: ignore[override]

        def actor_loss(self, other: Rollout, advantages: PerSample) -> PerToken: ...  # type: ignore[override]

    assert refused(Apart()) == [
        "`actor_loss` follows from what `rewards` scores through rows of `hints`, which cannot be told of failures. Set"
        " the reward's `on_error` to raise or zero"
    ]
