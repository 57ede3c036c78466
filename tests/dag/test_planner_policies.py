"""Plans of several policies: their weights, their engines, and rows of three levels."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rlflow.dag.graph import Graph
from rlflow.dag.node import node
from rlflow.dag.planner import plan
from rlflow.dag.tasks import DynamicSampling, Exchange, SyncWeights, Task
from rlflow.errors import UserError
from rlflow.values.batch import Batch
from rlflow.values.column_kinds import PerSample, PerToken
from rlflow.values.layout import Layout
from rlflow.values.rollout import Rollout
from tests.dag.plans import BOTH, GROUPS


class SelfPlay:
    """A policy that asks and one that answers, in rows of three levels."""

    @node(generates="proposer")
    def question(self, batch: Batch) -> Rollout: ...

    @node(generates="solver")
    def answer(self, question: Rollout) -> Rollout: ...

    @node
    def worth(self, question: Rollout) -> PerSample: ...

    @node
    def advantages(self, answer: Rollout, worth: PerSample) -> PerSample: ...

    @node(role="solver", type="train")
    def solver_loss(self, answer: Rollout, advantages: PerSample) -> PerToken: ...

    @node(role="proposer", type="train")
    def proposer_loss(self, question: Rollout, worth: PerSample) -> PerToken: ...


POLICIES = ("proposer", "solver")
TOGETHER = {"proposer.rollout": GROUPS, "solver.rollout": GROUPS, "proposer": GROUPS, "solver": GROUPS}


def steps_of(tasks: Sequence[Task]) -> list[str]:
    """The tasks that generate, train, sync and sleep, in words."""
    words = [" ".join(str(task).split(":")[0].split()) for task in tasks]
    return [text for text in words if text.split()[0] in ("sync", "run", "sleep", "train", "fill")]


def test_policies_are_synced_before_they_generate_with_one_engine_awake() -> None:
    assert steps_of(plan(Graph.read(SelfPlay(), POLICIES), TOGETHER, world_size=2).tasks) == [
        "sync proposer -> rollout",
        "run question",
        "sleep proposer",
        "sync solver -> rollout",
        "run answer",
        "sleep solver",
        "run worth",
        "run advantages",
        "train proposer_loss",
        "train solver_loss",
    ]


def test_policies_of_one_node_are_awake_together() -> None:
    class Module(SelfPlay):
        @node(generates=("proposer", "solver"))
        def answer(self, question: Rollout) -> Rollout: ...

    found = steps_of(plan(Graph.read(Module(), POLICIES), TOGETHER, world_size=2).tasks)
    assert found[:6] == [
        "sync proposer -> rollout",
        "run question",
        "sync solver -> rollout",
        "run answer",
        "sleep proposer",
        "sleep solver",
    ]


def test_a_frozen_policy_comes_from_its_files() -> None:
    class Module(SelfPlay):
        solver_loss = None

    tasks = plan(Graph.read(Module(), POLICIES), TOGETHER, world_size=2).tasks
    assert SyncWeights("solver", (), BOTH) in tasks
    assert str(SyncWeights("solver", (), BOTH)) == "sync      solver -> rollout: from its files, ranks 0-1"


def test_policies_that_share_an_engine_take_turns_within_what_repeats() -> None:
    class Module(SelfPlay):
        @node(type="filter")
        def useful(self, answer: Rollout) -> PerSample: ...

    graph = Graph.read(Module(), POLICIES)
    (fill,) = [task for task in plan(graph, TOGETHER, 2).tasks if isinstance(task, DynamicSampling)]
    assert not any(isinstance(task, SyncWeights) for task in fill.tasks)
    (fill,) = [
        task
        for task in plan(graph, TOGETHER, 2, shared={"solver": "proposer"}).tasks
        if isinstance(task, DynamicSampling)
    ]
    assert steps_of(fill.tasks)[:6] == [
        "sync proposer -> rollout",
        "run question",
        "sleep proposer",
        "sync solver -> rollout",
        "run answer",
        "sleep solver",
    ]


def test_a_value_of_rows_above_is_read_with_each_row_below() -> None:
    found = [task for task in plan(Graph.read(SelfPlay(), POLICIES), TOGETHER, 2).tasks if isinstance(task, Exchange)]
    assert Exchange("worth", reader_space="answer", source=GROUPS, target=GROUPS) in found


def test_policies_of_one_node_on_different_ranks_are_refused() -> None:
    class Module(SelfPlay):
        @node(generates=("proposer", "solver"))
        def answer(self, question: Rollout) -> Rollout: ...

    layouts = {**TOGETHER, "proposer.rollout": Layout((0,), 1), "solver.rollout": Layout((1,), 1)}
    with pytest.raises(UserError) as refused:
        plan(Graph.read(Module(), POLICIES), layouts, world_size=2)
    assert str(refused.value) == (
        "node `answer` generates with `proposer` on rank 0 and with `solver` on rank 1; place `proposer.rollout` and"
        " `solver.rollout` alike, or generate in a node for each"
    )
