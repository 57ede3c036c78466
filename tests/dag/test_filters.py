"""Graphs with a filter: the tasks that repeat, and the inputs and results that a filter may have."""

from __future__ import annotations

from rlflow.dag.graph import Graph
from rlflow.dag.node import node
from rlflow.values.batch import Batch
from rlflow.values.column_kinds import PerSample, PerToken, Scalar
from rlflow.values.rollout import Rollout
from tests.dag.modules import GRPO, ROLES, Filtered
from tests.dag.problems import problems


def test_a_filter_and_its_ancestors_come_first_and_train_nodes_last() -> None:
    graph = Graph.read(Filtered(), ROLES)
    assert [node.id for node in graph.block] == ["rollout", "rewards", "useful"]
    order = ["rollout", "rewards", "useful", "old_logprobs", "advantages", "actor_loss"]
    assert [node.id for node in graph.order] == order


def test_a_filter_returns_one_bool_a_row() -> None:
    class Module(GRPO):
        @node(type="filter")
        def useful(self, rollout: Rollout) -> PerToken: ...

    assert problems(Module()) == [
        "`useful` is a filter and returns PerToken; it says of each row whether it is kept."
        " Return one bool a row, `-> PerSample`"
    ]


def test_a_filter_does_not_sample() -> None:
    class Module(GRPO):
        @node(role="rollout", type="filter")
        def useful(self, batch: Batch) -> PerSample: ...

    assert problems(Module()) == [
        "`useful` is a filter and generates, and what samples cannot choose or train."
        " Generate in a node of its own, and read that"
    ]


def test_two_filters_are_to_be_one() -> None:
    class Module(Filtered):
        @node(type="filter")
        def short(self, rollout: Rollout) -> PerSample: ...

    (problem,) = problems(Module())
    assert problem.startswith("`short` is a second filter next to `useful` (")
    assert problem.endswith("), and rows are chosen once. Combine the two into one")


def test_a_filter_reads_rows() -> None:
    class Numbers(GRPO):
        @node
        def mean_reward(self, rewards: PerSample) -> Scalar: ...

        @node(type="filter")
        def useful(self, mean_reward: Scalar) -> PerSample: ...

    class Nothing(GRPO):
        @node(type="filter")
        def useful(self) -> PerSample: ...

    class Rows(GRPO):
        @node
        def made_up(self) -> PerSample: ...

        @node(type="filter")
        def useful(self, made_up: PerSample) -> PerSample: ...

    told = "`useful` is a filter and reads neither prompts nor samples. Read the rows that it chooses from"
    assert problems(Numbers()) == [told]
    assert problems(Nothing()) == [told]
    assert problems(Rows()) == [told]


def test_a_number_of_one_draw_is_not_read_after_the_filter() -> None:
    class Module(Filtered):
        @node
        def mean_reward(self, rewards: PerSample) -> Scalar: ...

        def useful(self, rewards: PerSample, mean_reward: Scalar) -> PerSample: ...

        def advantages(self, rewards: PerSample, mean_reward: Scalar) -> PerSample: ...

    (problem,) = problems(Module())
    assert problem.startswith("`advantages` reads `mean_reward` (")
    assert problem.endswith(
        "), a Scalar of one draw, and the rows that pass the filter `useful` are of several."
        " Compute it in a node that comes after the filter"
    )


def test_a_filter_does_not_read_a_loss() -> None:
    class Module(GRPO):
        @node(type="filter")
        def useful(self, rollout: Rollout, actor_loss: PerToken) -> PerSample: ...

    (problem,) = problems(Module())
    assert problem.startswith("`useful` reads `actor_loss`, a train node (")
