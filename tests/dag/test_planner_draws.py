"""Plans whose tasks repeat: for a filter, or where responses are cut off."""

from __future__ import annotations

import pytest

from rlflow.dag.graph import Graph
from rlflow.dag.node import node
from rlflow.dag.planner import Plan, plan
from rlflow.dag.tasks import (
    DeferUnfinished,
    DynamicSampling,
    Exchange,
    Load,
    Reduce,
    RunNode,
    Sleep,
    SyncWeights,
    TrainNode,
)
from rlflow.errors import UserError
from rlflow.values.batch import Batch
from rlflow.values.column_kinds import PerSample, PerToken
from rlflow.values.layout import Layout
from rlflow.values.rollout import Rollout
from tests.dag.modules import GRPO, ROLES, SFT, Filtered, ReMax
from tests.dag.plans import BALANCED, BOTH, GROUPS, two_ranks


def test_a_filter_and_its_ancestors_repeat_and_all_else_comes_after_them() -> None:
    assert two_ranks(Filtered()).tasks == (
        SyncWeights("actor", BOTH, BOTH),
        DynamicSampling(
            "useful",
            (
                Load("batch", GROUPS),
                RunNode("rollout", GROUPS, frees=("batch",)),
                RunNode("rewards", GROUPS, frees=()),
                RunNode("useful", GROUPS, frees=()),
            ),
            keeps=("rollout", "rewards"),
            ranks=BOTH,
        ),
        Sleep("actor", BOTH),
        Exchange("rollout", "rollout", GROUPS, BALANCED),
        RunNode("old_logprobs", BALANCED, frees=()),
        RunNode("advantages", GROUPS, frees=("rewards",)),
        Exchange("advantages", "rollout", GROUPS, BALANCED),
        TrainNode("actor_loss", BALANCED, frees=("rollout", "advantages", "old_logprobs")),
        Reduce(BOTH),
    )


def cut_off(module: object) -> Plan:
    """The plan on two ranks, where long responses are cut off."""
    layouts = {"actor.rollout": GROUPS, "actor": BALANCED, "reference": BALANCED}
    return plan(Graph.read(module, ROLES), layouts, world_size=2, cuts_off=True)


def test_responses_that_are_cut_off_are_held_back_before_anything_reads_them() -> None:
    tasks = cut_off(GRPO()).tasks
    assert tasks[:4] == (
        SyncWeights("actor", BOTH, BOTH),
        DynamicSampling(
            None,
            (
                Load("batch", GROUPS),
                RunNode("rollout", GROUPS, frees=()),
                DeferUnfinished("rollout", frees=("batch",), ranks=BOTH),
            ),
            keeps=("rollout",),
            ranks=BOTH,
        ),
        Sleep("actor", BOTH),
        Exchange("rollout", "rollout", GROUPS, BALANCED),
    )
    assert tasks[3:] == two_ranks(GRPO()).tasks[4:]


def test_prompts_are_held_until_all_that_reads_them_has_run() -> None:
    class DeclaredFirst:
        @node
        def difficulty(self, batch: Batch) -> PerSample: ...

    class Module(Filtered, DeclaredFirst):
        def useful(self, rollout: Rollout, rewards: PerSample, difficulty: PerSample) -> PerSample: ...

    (fill,) = [task for task in cut_off(Module()).tasks if isinstance(task, DynamicSampling)]
    assert DeferUnfinished("rollout", frees=(), ranks=BOTH) in fill.tasks
    assert RunNode("difficulty", GROUPS, frees=("batch",)) in fill.tasks


def test_a_filter_reads_what_was_not_held_back() -> None:
    class Module(Filtered):
        def rewards(self, rollout: Rollout, batch: Batch) -> PerSample: ...

    (fill,) = [task for task in cut_off(Module()).tasks if isinstance(task, DynamicSampling)]
    assert fill.tasks == (
        Load("batch", GROUPS),
        RunNode("rollout", GROUPS, frees=()),
        DeferUnfinished("rollout", frees=(), ranks=BOTH),
        Exchange("batch", "rollout", GROUPS, GROUPS),
        RunNode("rewards", GROUPS, frees=("batch",)),
        RunNode("useful", GROUPS, frees=()),
    )


class FilteredPrompts(GRPO):
    @node(type="filter")
    def hard(self, batch: Batch) -> PerSample: ...


class SamplesHarder(GRPO):
    @node
    def difficulty(self, batch: Batch) -> PerSample: ...

    @node(role="rollout")
    def rollout(self, batch: Batch, difficulty: PerSample) -> Rollout: ...


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (SFT(), "no node generates; leave it out, or take an algorithm with one rollout node"),
        (ReMax(), "`rollout` and `greedy` would have to wait for one another; leave it out, or take an algorithm with"),
        (SamplesHarder(), "`rollout` reads `difficulty`, which is of one draw; leave it out, or let the node sample"),
        (FilteredPrompts(), "the filter `hard` chooses prompts before `rollout` samples; leave it out, or let"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_responses_are_cut_off_of_one_node_that_samples_prompts(module: object, why: str) -> None:
    with pytest.raises(UserError) as caught:
        cut_off(module)
    assert str(caught.value).startswith(f"`trainer.partial_rollout` is set, and {why}")


class FilteredByLogprobs(Filtered):
    """The filter reads a scored value, which is read later too."""

    def useful(self, rewards: PerSample, old_logprobs: PerToken) -> PerSample: ...


def test_a_value_is_exchanged_in_each_draw_and_once_more_for_later_readers() -> None:
    tasks = two_ranks(FilteredByLogprobs()).tasks
    (fill,) = [task for task in tasks if isinstance(task, DynamicSampling)]
    moved = Exchange("rollout", "rollout", GROUPS, BALANCED)
    assert fill.keeps == ("rollout", "rewards", "old_logprobs")
    assert fill.tasks.count(moved) == 1
    assert tasks.count(moved) == 1


def test_a_prompts_value_is_kept_for_a_rollout_after_the_filter() -> None:
    class Module(Filtered):
        @node(role="rollout")
        def greedy(self, batch: Batch) -> Rollout: ...

    tasks = two_ranks(Module()).tasks
    assert "batch" in next(task.keeps for task in tasks if isinstance(task, DynamicSampling))
    assert RunNode("greedy", GROUPS, frees=("batch", "greedy")) in tasks
    assert [task for task in tasks if isinstance(task, SyncWeights)] == [SyncWeights("actor", BOTH, BOTH)]


def test_weights_come_before_the_first_rollout_where_the_filter_chooses_prompts() -> None:
    class Module(GRPO):
        @node(type="filter")
        def hard(self, batch: Batch) -> PerSample: ...

    kinds = [type(task) for task in two_ranks(Module()).tasks]
    assert kinds[:3] == [DynamicSampling, SyncWeights, RunNode]


def test_a_plan_has_the_layouts_and_exchanges_of_repeated_nodes_too() -> None:
    module, planned = FilteredByLogprobs(), two_ranks(FilteredByLogprobs())
    nodes = Graph.read(module, ROLES).nodes
    assert planned.layouts() | {"useful": None} == {
        "batch": GROUPS,
        "rollout": GROUPS,
        "rewards": GROUPS,
        "old_logprobs": BALANCED,
        "useful": None,
        "advantages": GROUPS,
        "actor_loss": BALANCED,
    }
    assert planned.exchange("rollout", nodes["old_logprobs"], "rollout") == Exchange(
        "rollout", "rollout", GROUPS, BALANCED
    )
    assert planned.exchange("rollout", nodes["rewards"], "rollout") is None


def test_a_rank_repeats_the_tasks_that_name_it() -> None:
    layouts = {"actor.rollout": Layout((0,), 1), "actor": Layout((1,), 1, "balanced")}
    planned = plan(Graph.read(Filtered(), ROLES), layouts, world_size=2)
    fills = [task for rank in (0, 1) for task in planned.for_rank(rank) if isinstance(task, DynamicSampling)]
    assert [len(fill.tasks) for fill in fills] == [4]  # rank 1 has no part in it


def test_repeated_tasks_are_printed_below_what_repeats_them_and_count_for_the_digest() -> None:
    planned = two_ranks(Filtered())
    assert str(planned).splitlines()[:4] == [
        "sync      actor -> rollout: ranks 0-1",
        "resample  useful: ranks 0-1; keeps rollout, rewards; repeats",
        "  load      batch: ranks 0-1, 2 shards, groups",
        "  run       rollout: ranks 0-1, 2 shards, groups; frees batch",
    ]
    assert planned.digest != two_ranks(FilteredByLogprobs()).digest
