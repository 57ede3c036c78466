"""The plan: the global order of tasks, where values are moved, and when they are freed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from rlflow import Written
from rlflow.dag.graph import Graph
from rlflow.dag.node import node
from rlflow.dag.planner import Plan, plan
from rlflow.dag.tasks import Exchange, Fill, HoldBack, Load, Reduce, RunNode, Sleep, SyncWeights, Task, Tell, TrainNode
from rlflow.errors import UserError
from rlflow.values.batch import Batch
from rlflow.values.cuts import PerSample, PerToken
from rlflow.values.layout import Layout
from rlflow.values.rollout import Rollout
from tests.dag.modules import GRPO, ROLES, SFT, Filtered, ReMax

BOTH = (0, 1)
GROUPS = Layout(BOTH, 2)
BALANCED = Layout(BOTH, 2, "balanced", 64)


def two_ranks(module: object, rollout: Layout = GROUPS) -> Plan:
    """The plan of a module on two ranks, training and scoring balanced."""
    layouts = {"actor.rollout": rollout, "actor": BALANCED, "reference": BALANCED}
    return plan(Graph.read(module, ROLES), layouts, world_size=2)


def test_the_plan_of_grpo_on_two_ranks() -> None:
    assert two_ranks(GRPO()).tasks == (
        Load("batch", GROUPS),
        SyncWeights("actor", BOTH, BOTH),
        RunNode("rollout", GROUPS, frees=("batch",)),
        Sleep("actor", BOTH),
        Exchange("rollout", "rollout", GROUPS, BALANCED),  # once for three readers
        RunNode("rewards", GROUPS, frees=()),
        RunNode("ref_logprobs", BALANCED, frees=()),
        RunNode("old_logprobs", BALANCED, frees=()),
        RunNode("advantages", GROUPS, frees=("rewards",)),
        Exchange("advantages", "rollout", GROUPS, BALANCED),
        TrainNode("actor_loss", BALANCED, frees=("rollout", "advantages", "old_logprobs", "ref_logprobs")),
        Reduce(BOTH),
    )


def test_a_filter_and_its_ancestors_repeat_and_all_else_comes_after_them() -> None:
    assert two_ranks(Filtered()).tasks == (
        SyncWeights("actor", BOTH, BOTH),
        Fill(
            "useful",
            (
                Load("batch", GROUPS),
                RunNode("rollout", GROUPS, frees=("batch",)),
                RunNode("rewards", GROUPS, frees=()),
                RunNode("useful", GROUPS, frees=()),
            ),
            keeps=("rollout", "rewards"),
            members=BOTH,
        ),
        Sleep("actor", BOTH),
        Exchange("rollout", "rollout", GROUPS, BALANCED),
        RunNode("old_logprobs", BALANCED, frees=()),
        RunNode("advantages", GROUPS, frees=("rewards",)),
        Exchange("advantages", "rollout", GROUPS, BALANCED),
        TrainNode("actor_loss", BALANCED, frees=("rollout", "advantages", "old_logprobs")),
        Reduce(BOTH),
    )


def test_prompts_come_beside_samples_once_these_are_made() -> None:
    class Module(GRPO):
        def rewards(self, rollout: Rollout, batch: Batch) -> PerSample: ...

    tasks = two_ranks(Module()).tasks
    place = tasks.index(RunNode("rollout", GROUPS, frees=()))
    assert tasks[place + 2 : place + 4] == (
        Exchange("batch", "rollout", GROUPS, GROUPS),
        Exchange("rollout", "rollout", GROUPS, BALANCED),
    )


def cut_off(module: object) -> Plan:
    """The plan on two ranks, where long responses are cut off."""
    layouts = {"actor.rollout": GROUPS, "actor": BALANCED, "reference": BALANCED}
    return plan(Graph.read(module, ROLES), layouts, world_size=2, cuts_off=True)


def test_responses_that_are_cut_off_are_held_back_before_anything_reads_them() -> None:
    tasks = cut_off(GRPO()).tasks
    assert tasks[:4] == (
        SyncWeights("actor", BOTH, BOTH),
        Fill(
            None,
            (
                Load("batch", GROUPS),
                RunNode("rollout", GROUPS, frees=()),
                HoldBack("rollout", frees=("batch",), members=BOTH),
            ),
            keeps=("rollout",),
            members=BOTH,
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

    (fill,) = [task for task in cut_off(Module()).tasks if isinstance(task, Fill)]
    assert HoldBack("rollout", frees=(), members=BOTH) in fill.tasks
    assert RunNode("difficulty", GROUPS, frees=("batch",)) in fill.tasks


def test_a_filter_reads_what_was_not_held_back() -> None:
    class Module(Filtered):
        def rewards(self, rollout: Rollout, batch: Batch) -> PerSample: ...

    (fill,) = [task for task in cut_off(Module()).tasks if isinstance(task, Fill)]
    assert fill.tasks == (
        Load("batch", GROUPS),
        RunNode("rollout", GROUPS, frees=()),
        HoldBack("rollout", frees=(), members=BOTH),
        Exchange("batch", "rollout", GROUPS, GROUPS),
        RunNode("rewards", GROUPS, frees=("batch",)),
        RunNode("useful", GROUPS, frees=()),
    )


class FilteredPrompts(GRPO):
    @node(type="filter")
    def hard(self, batch: Batch) -> PerSample: ...


class SamplesBeside(GRPO):
    @node(role="rollout", rows="batch")
    def rollout(self, batch: Batch) -> Rollout: ...


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
        (SamplesBeside(), "`rollout` samples beside the prompts' own rows; leave it out, or let the node sample from"),
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


def test_a_value_is_exchanged_at_each_draw_for_readers_in_it_and_once_more_for_later_ones() -> None:
    tasks = two_ranks(FilteredByLogprobs()).tasks
    (fill,) = [task for task in tasks if isinstance(task, Fill)]
    moved = Exchange("rollout", "rollout", GROUPS, BALANCED)
    assert fill.keeps == ("rollout", "rewards", "old_logprobs")
    assert fill.tasks.count(moved) == 1
    assert tasks.count(moved) == 1


def test_a_prompts_value_is_kept_for_a_rollout_after_the_filter() -> None:
    class Module(Filtered):
        @node(role="rollout", rows="batch")
        def greedy(self, batch: Batch) -> Rollout: ...

    tasks = two_ranks(Module()).tasks
    assert "batch" in next(task.keeps for task in tasks if isinstance(task, Fill))
    assert RunNode("greedy", GROUPS, frees=("batch", "greedy")) in tasks
    assert [task for task in tasks if isinstance(task, SyncWeights)] == [SyncWeights("actor", BOTH, BOTH)]


def test_weights_come_before_the_first_rollout_where_the_filter_chooses_prompts() -> None:
    class Module(GRPO):
        @node(type="filter")
        def hard(self, batch: Batch) -> PerSample: ...

    kinds = [type(task) for task in two_ranks(Module()).tasks]
    assert kinds[:3] == [Fill, SyncWeights, RunNode]


def test_what_a_plan_says_of_values_and_readers_holds_for_those_that_repeat() -> None:
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
    assert planned.exchange("rollout", nodes["old_logprobs"]) == Exchange("rollout", "rollout", GROUPS, BALANCED)
    assert planned.exchange("rollout", nodes["rewards"]) is None


def test_a_rank_repeats_the_tasks_that_name_it() -> None:
    layouts = {"actor.rollout": Layout((0,), 1), "actor": Layout((1,), 1, "balanced")}
    planned = plan(Graph.read(Filtered(), ROLES), layouts, world_size=2)
    fills = [task for rank in (0, 1) for task in planned.for_rank(rank) if isinstance(task, Fill)]
    assert [len(fill.tasks) for fill in fills] == [4]  # rank 1 has no part in it


def test_repeated_tasks_are_printed_below_what_repeats_them_and_count_for_the_digest() -> None:
    planned = two_ranks(Filtered())
    assert str(planned).splitlines()[:4] == [
        "sync      actor -> rollout: ranks 0-1",
        "fill      useful: ranks 0-1; keeps rollout, rewards; repeats",
        "  load      batch: ranks 0-1, 2 shards, groups",
        "  run       rollout: ranks 0-1, 2 shards, groups; frees batch",
    ]
    assert planned.digest != two_ranks(FilteredByLogprobs()).digest


def test_rows_are_loaded_on_the_ranks_of_their_first_reader_and_balanced_by_an_exchange() -> None:
    assert two_ranks(SFT()).tasks == (
        Load("batch", GROUPS),
        Exchange("batch", "batch", GROUPS, BALANCED),
        TrainNode("actor_loss", BALANCED, frees=("batch",)),
        Reduce(BOTH),
    )


def test_rows_are_read_once_and_exchanged_for_readers_elsewhere() -> None:
    class Module(SFT):
        @node
        def lengths(self, batch: Batch) -> PerSample: ...

    assert two_ranks(Module()).tasks[:2] == (Load("batch", GROUPS), Exchange("batch", "batch", GROUPS, BALANCED))


def test_a_prompts_value_beside_samples_is_exchanged_even_in_one_layout() -> None:
    found = [task for task in two_ranks(ReMax()).tasks if isinstance(task, Exchange) and task.value == "baseline"]
    assert found == [Exchange("baseline", reader_space="rollout", source=GROUPS, target=GROUPS)]


def test_a_rollout_node_reads_prompts_in_their_own_rows() -> None:
    assert not any(isinstance(task, Exchange) and task.value == "batch" for task in two_ranks(ReMax()).tasks)


def test_weights_are_brought_in_once_before_the_first_of_two_rollouts() -> None:
    tasks = two_ranks(ReMax()).tasks
    syncs = [i for i, task in enumerate(tasks) if isinstance(task, SyncWeights)]
    runs = [i for i, task in enumerate(tasks) if isinstance(task, RunNode) and task.node_id in ("rollout", "greedy")]
    assert len(syncs) == 1
    assert syncs[0] == runs[0] - 1


def test_equal_layouts_move_nothing() -> None:
    layouts = dict.fromkeys(("actor.rollout", "actor", "reference"), GROUPS)
    assert not any(isinstance(task, Exchange) for task in plan(Graph.read(GRPO(), ROLES), layouts, 2).tasks)


def test_a_node_without_a_role_holds_one_shard_on_each_rank_that_made_its_value() -> None:
    tensor_parallel = Layout((0, 1, 2, 3), 2)  # two engines of two ranks
    layouts = {"actor.rollout": tensor_parallel, "actor": Layout((4, 5), 2, "balanced"), "reference": Layout((4, 5), 2)}
    planned = plan(Graph.read(GRPO(), ROLES), layouts, world_size=6)
    assert planned.layouts()["rewards"] == Layout((0, 1, 2, 3), 4)
    assert Exchange("rollout", "rollout", tensor_parallel, Layout((0, 1, 2, 3), 4)) in planned.tasks


def test_a_node_without_a_role_follows_the_last_planned_value_it_reads() -> None:
    class Module(GRPO):
        @node
        def gaps(self, rewards: PerSample, old_logprobs: PerToken) -> PerSample: ...

    layouts = {
        "actor.rollout": Layout((0, 1), 2),
        "actor": Layout((2, 3), 2, "balanced"),
        "reference": Layout((2, 3), 2),
    }
    planned = plan(Graph.read(Module(), ROLES), layouts, world_size=4)
    assert planned.layouts()["gaps"] == Layout((2, 3), 2)


def test_a_node_without_a_role_that_reads_only_the_batch_runs_on_all_ranks() -> None:
    class Module(SFT):
        @node
        def lengths(self, batch: Batch) -> PerSample: ...

    planned = plan(Graph.read(Module(), ROLES), {"actor": Layout((1,), 1, "balanced")}, world_size=3)
    assert planned.layouts()["lengths"] == Layout((0, 1, 2), 3)


def test_a_value_that_nobody_reads_is_freed_by_its_own_node() -> None:
    class Module(SFT):
        @node
        def lengths(self, batch: Batch) -> PerSample: ...

    assert RunNode("lengths", GROUPS, frees=("lengths",)) in two_ranks(Module()).tasks


def test_a_rank_runs_the_tasks_that_name_it_in_the_global_order() -> None:
    layouts = {
        "actor.rollout": Layout((0,), 1),
        "actor": Layout((1,), 1, "balanced"),
        "reference": Layout((1,), 1, "balanced"),
    }
    planned = plan(Graph.read(GRPO(), ROLES), layouts, world_size=2)
    first = [str(task).split(":")[0].split() for task in planned.for_rank(0)]
    second = [str(task).split(":")[0].split() for task in planned.for_rank(1)]
    assert first == [
        ["load", "batch"],
        ["sync", "actor", "->", "rollout"],
        ["run", "rollout"],
        ["tell", "rows", "of", "rollout"],  # to rank 1, which has no part in making them
        ["exchange", "rollout"],
        ["run", "rewards"],
        ["run", "advantages"],
        ["exchange", "advantages"],
        ["reduce", "metrics"],
    ]
    assert second == [
        ["sync", "actor", "->", "rollout"],
        ["tell", "rows", "of", "rollout"],
        ["exchange", "rollout"],
        ["run", "ref_logprobs"],
        ["run", "old_logprobs"],
        ["exchange", "advantages"],
        ["train", "actor_loss"],
        ["reduce", "metrics"],
    ]


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
        Tell("rollout", 0, (1, 2)),
        Exchange("rollout", "rollout", GENERATES, TRAINS),
        Exchange("advantages", "rollout", GENERATES, TRAINS),
        Reduce((0, 1, 2), lag=1),
    )
    assert planned.crossing() == planned.tasks[8:11]


def test_a_value_is_not_freed_before_training_a_step_later_has_read_it() -> None:
    planned = plan(Graph.read(GRPO(), ROLES), APART, world_size=3, max_staleness=2)
    freed = {name: task.lag for task in planned.tasks if isinstance(task, RunNode | TrainNode) for name in task.frees}
    assert freed == {"batch": 0, "rewards": 0, "rollout": 2, "advantages": 2, "old_logprobs": 2, "ref_logprobs": 2}


def test_a_filter_runs_ahead_without_the_ranks_that_train() -> None:
    layouts = {"actor.rollout": Layout((0, 1), 2), "actor": Layout((2,), 1, "balanced")}
    planned = plan(Graph.read(Filtered(), ROLES), layouts, world_size=3, max_staleness=1)
    (fill,) = [task for task in planned.tasks if isinstance(task, Fill)]
    assert fill.members == (0, 1)
    assert fill.lag == 0
    assert Tell("rollout", 0, (2,)) in planned.crossing()


def test_ranks_that_train_are_told_of_rows_when_they_have_trained() -> None:
    layouts = {
        "actor.rollout": GENERATES,
        "reference": Layout((1,), 1, "balanced"),
        "actor": Layout((2,), 1, "balanced"),
    }
    planned = plan(Graph.read(GRPO(), ROLES), layouts, world_size=3, max_staleness=1)
    told = [task for task in planned.tasks if isinstance(task, Tell)]
    assert told == [Tell("rollout", 0, (1,)), Tell("rollout", 0, (2,))]
    assert told[1] in planned.crossing()


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


def test_each_policy_gets_its_weights_before_it_generates_and_one_engine_is_awake_at_a_time() -> None:
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
    (fill,) = [task for task in plan(graph, TOGETHER, 2).tasks if isinstance(task, Fill)]
    assert not any(isinstance(task, SyncWeights) for task in fill.tasks)
    (fill,) = [task for task in plan(graph, TOGETHER, 2, shared={"solver": "proposer"}).tasks if isinstance(task, Fill)]
    assert steps_of(fill.tasks)[:6] == [
        "sync proposer -> rollout",
        "run question",
        "sleep proposer",
        "sync solver -> rollout",
        "run answer",
        "sleep solver",
    ]


def test_a_value_of_rows_above_is_seen_beside_each_row_below() -> None:
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


class ReadsTexts(GRPO):
    """Its rewards are of texts, and of what is made where the actor trains."""

    @node
    def rewards(self, rollout: Written, old_logprobs: PerToken) -> PerSample: ...


def test_a_node_that_reads_texts_runs_where_they_were_made() -> None:
    layouts = {
        "actor.rollout": Layout((0, 1), 2),
        "actor": Layout((2, 3), 2, "balanced"),
        "reference": Layout((2, 3), 2),
    }
    planned = plan(Graph.read(ReadsTexts(), ROLES), layouts, world_size=4)
    assert planned.layouts()["rewards"] == Layout((0, 1), 2)


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
        if isinstance(task, Fill)
    ]
    assert fill.members == (0, 2)
    assert [task for task in fill.tasks if isinstance(task, Tell)] == [Tell("batch", 0, (2,)), Tell("rollout", 0, (2,))]


def test_a_task_prints_all_that_tells_it_from_another() -> None:
    layout = Layout((0, 1, 4, 5), 2, "balanced", 64)
    task = str(Exchange("rollout", "rollout", Layout((3,), 1), layout))
    assert task == (
        "exchange  rollout: rank 3, 1 shard, groups"
        " -> ranks 0-1,4-5, 2 shards x 2 copies, balanced in updates of 64 rows; rows of rollout"
    )


def test_the_digest_tells_plans_apart() -> None:
    assert two_ranks(GRPO()).digest == two_ranks(GRPO()).digest
    assert two_ranks(GRPO()).digest != two_ranks(GRPO(), rollout=Layout(BOTH, 1)).digest


def test_the_digest_is_the_same_in_processes_that_hash_differently() -> None:
    code = "from tests.dag import modules, test_planner as t; print(t.two_ranks(modules.ReMax()).digest)"
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert digests == {two_ranks(ReMax()).digest}
