"""Plans whose steps overlap: generation runs ahead of training."""

from __future__ import annotations

import pytest

from rlflow.dag.graph import Graph
from rlflow.dag.node import node
from rlflow.dag.planner import plan
from rlflow.dag.tasks import BroadcastRows, DynamicSampling, Exchange, Load, Reduce, RunNode, SyncWeights, TrainNode
from rlflow.errors import UserError
from rlflow.values.batch import Batch
from rlflow.values.column_kinds import PerSample, PerToken
from rlflow.values.layout import Layout
from rlflow.values.rollout import Rollout
from tests.dag.modules import GRPO, ROLES, SFT, Filtered

GENERATES, TRAINS = Layout((0,), 1), Layout((1, 2), 2, "balanced")
APART = {"actor.rollout": GENERATES, "actor": TRAINS, "reference": TRAINS}


def test_generation_runs_a_step_ahead_of_training() -> None:
    planned = plan(Graph.read(GRPO(), ROLES), APART, world_size=3, max_staleness=1)
    assert planned.tasks == (
        Load("batch", GENERATES),
        SyncWeights("actor", (1, 2), (0,)),
        RunNode("rollout", GENERATES, frees=("batch",)),
        RunNode("rewards", GENERATES, frees=()),
        RunNode("advantages", GENERATES, frees=("rewards",)),
        RunNode("ref_logprobs", TRAINS, frees=(), lag=1),
        RunNode("old_logprobs", TRAINS, frees=(), lag=1),
        TrainNode("actor_loss", TRAINS, frees=("rollout", "advantages", "old_logprobs", "ref_logprobs"), lag=1),
        BroadcastRows("rollout", 0, (1, 2)),
        Exchange("rollout", "rollout", GENERATES, TRAINS),
        Exchange("advantages", "rollout", GENERATES, TRAINS),
        Reduce((0, 1, 2), lag=1),
    )
    assert planned.crossing() == planned.tasks[8:11]


def test_nothing_crosses_where_nothing_trains() -> None:
    class Module:
        @node(generates="actor")
        def rollout(self, batch: Batch) -> Rollout: ...

    planned = plan(Graph.read(Module(), ROLES), {"actor.rollout": GENERATES}, world_size=2, max_staleness=1)
    assert planned.crossing() == ()


def test_a_value_is_not_freed_before_training_a_step_later_has_read_it() -> None:
    planned = plan(Graph.read(GRPO(), ROLES), APART, world_size=3, max_staleness=2)
    freed = {name: task.lag for task in planned.tasks if isinstance(task, RunNode | TrainNode) for name in task.frees}
    assert freed == {"batch": 0, "rewards": 0, "rollout": 2, "advantages": 2, "old_logprobs": 2, "ref_logprobs": 2}


def test_a_filter_runs_ahead_without_the_ranks_that_train() -> None:
    layouts = {"actor.rollout": Layout((0, 1), 2), "actor": Layout((2,), 1, "balanced")}
    planned = plan(Graph.read(Filtered(), ROLES), layouts, world_size=3, max_staleness=1)
    (fill,) = [task for task in planned.tasks if isinstance(task, DynamicSampling)]
    assert fill.ranks == (0, 1)
    assert fill.lag == 0
    assert BroadcastRows("rollout", 0, (2,)) in planned.crossing()


def test_rows_are_broadcast_to_ranks_that_train_after_their_training() -> None:
    layouts = {
        "actor.rollout": GENERATES,
        "reference": Layout((1,), 1, "balanced"),
        "actor": Layout((2,), 1, "balanced"),
    }
    planned = plan(Graph.read(GRPO(), ROLES), layouts, world_size=3, max_staleness=1)
    told = [task for task in planned.tasks if isinstance(task, BroadcastRows)]
    assert told == [BroadcastRows("rollout", 0, (1,)), BroadcastRows("rollout", 0, (2,))]
    assert told[1] in planned.crossing()


def test_a_value_is_exchanged_once_for_readers_of_both_steps() -> None:
    class Module(GRPO):
        @node(role="reference")
        def gap(self, rollout: Rollout, old_logprobs: PerToken) -> PerToken: ...

        def actor_loss(self, rollout: Rollout, advantages: PerSample, gap: PerToken) -> PerToken: ...

    layouts = {
        "actor.rollout": GENERATES,
        "reference": Layout((1,), 1, "balanced"),
        "actor": Layout((2,), 1, "balanced"),
    }
    planned = plan(Graph.read(Module(), ROLES), layouts, world_size=3, max_staleness=1)
    exchanges = [task for task in planned.tasks if isinstance(task, Exchange) and task.value == "rollout"]
    assert sorted(task.target.ranks for task in exchanges) == [(1,), (2,)]


def test_ranks_that_train_cannot_run_ahead() -> None:
    layouts = {"actor.rollout": Layout((0, 1), 2), "actor": Layout((1, 2), 2), "reference": Layout((1, 2), 2)}
    with pytest.raises(UserError, match="`rollout` cannot run ahead of training: rank 1 would both generate and train"):
        plan(Graph.read(GRPO(), ROLES), layouts, world_size=3, max_staleness=1)


def test_nothing_runs_ahead_where_nothing_generates() -> None:
    with pytest.raises(UserError, match="no node generates, so nothing can run ahead"):
        plan(Graph.read(SFT(), ROLES), {"actor": Layout((0,), 1)}, world_size=1, max_staleness=1)


def test_a_filter_that_needs_what_training_ranks_make_cannot_run_ahead() -> None:
    class Module(Filtered):
        @node(role="actor")
        def old_logprobs(self, rollout: Rollout) -> PerToken: ...

        def useful(self, rewards: PerSample, old_logprobs: PerToken) -> PerSample: ...

    layouts = {"actor.rollout": Layout((0,), 1), "actor": Layout((1,), 1, "balanced")}
    with pytest.raises(UserError, match="the filter `useful` needs `old_logprobs`, which runs on ranks that train"):
        plan(Graph.read(Module(), ROLES), layouts, world_size=2, max_staleness=1)


def test_ranks_in_a_filters_tasks_know_the_rows_that_others_of_them_make() -> None:
    layouts = {"actor.rollout": Layout((0,), 1), "actor": Layout((1,), 1, "balanced"), "reference": Layout((2,), 1)}

    class Module(Filtered):
        @node(role="reference")
        def ref_logprobs(self, rollout: Rollout) -> PerToken: ...

        def useful(self, rewards: PerSample, ref_logprobs: PerToken) -> PerSample: ...

    (fill,) = [
        task
        for task in plan(Graph.read(Module(), ROLES), layouts, world_size=3, max_staleness=1).tasks
        if isinstance(task, DynamicSampling)
    ]
    assert fill.ranks == (0, 2)
    assert [task for task in fill.tasks if isinstance(task, BroadcastRows)] == [
        BroadcastRows("batch", 0, (2,)),
        BroadcastRows("rollout", 0, (2,)),
    ]
