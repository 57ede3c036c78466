"""The plan: the global order of tasks, where values are moved, and when they are freed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rlflow.dag.graph import Graph
from rlflow.dag.node import node
from rlflow.dag.planner import plan
from rlflow.dag.tasks import Exchange, Load, Reduce, RunNode, Sleep, SyncWeights, TrainNode
from rlflow.types import Grouped, Sampled, WithLossMask, WithTexts
from rlflow.values.batch import Batch
from rlflow.values.column_kinds import PerSample, PerToken
from rlflow.values.layout import Layout
from rlflow.values.rollout import Rollout
from tests.dag.modules import GRPO, ROLES, SFT, ReMax
from tests.dag.plans import BALANCED, BOTH, GROUPS, two_ranks


def test_the_plan_of_grpo_on_two_ranks_has_these_tasks() -> None:
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


def test_prompts_follow_their_samples_once_these_are_made() -> None:
    class Module(GRPO):
        def rewards(self, rollout: Rollout, batch: Batch) -> PerSample: ...

    tasks = two_ranks(Module()).tasks
    place = tasks.index(RunNode("rollout", GROUPS, frees=()))
    assert tasks[place + 2 : place + 4] == (
        Exchange("batch", "rollout", GROUPS, GROUPS),
        Exchange("rollout", "rollout", GROUPS, BALANCED),
    )


def test_rows_load_on_ranks_of_their_first_reader_and_an_exchange_balances_them() -> None:
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


def test_a_prompts_value_read_with_samples_is_exchanged_even_in_one_layout() -> None:
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


class Apart(GRPO):
    """Nodes without a role; some of them could run on other ranks."""

    @node
    def gaps(self, rewards: PerSample, old_logprobs: PerToken) -> PerSample: ...

    @node
    def grouped(self, rollout: Grouped, gaps: PerSample, old_logprobs: PerToken) -> PerToken: ...

    @node
    def said(self, rollout: WithTexts, gaps: PerSample) -> PerSample: ...

    @node
    def numbers(self, rewards: PerSample, said: PerSample) -> PerSample: ...

    @node
    def masked(self, rollout: WithLossMask, gaps: PerSample) -> PerSample: ...

    @node
    def read_there(self, rollout: WithLossMask, masked: PerSample, old_logprobs: PerToken) -> PerToken: ...


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gaps", Layout((2, 3), 2, "balanced")),  # most of what it reads is there: a number a token, against one a row
        ("grouped", Layout((2, 3), 2)),  # on these ranks, and in whole groups
        ("said", Layout((0, 1), 2)),  # texts stay at home
        ("numbers", Layout((0, 1), 2)),  # both are there
        ("masked", Layout((2, 3), 2, "balanced")),  # where the mask is needed anyway, with what it reads
        ("read_there", Layout((2, 3), 2, "balanced")),
    ],
)
def test_a_node_without_a_role_runs_where_most_of_what_it_reads_is(name: str, layout: Layout) -> None:
    layouts = {
        "actor.rollout": Layout((0, 1), 2),
        "actor": Layout((2, 3), 2, "balanced"),
        "reference": Layout((2, 3), 2, "balanced"),
    }
    planned = plan(Graph.read(Apart(), ROLES), layouts, world_size=4)
    assert planned.layouts()[name] == layout


def test_a_node_that_need_not_see_groups_saves_its_exchanges() -> None:
    class Module(GRPO):
        @node
        def gaps(self, ref_logprobs: PerToken, old_logprobs: PerToken) -> PerToken: ...

        @node(role="actor", type="train")
        def actor_loss(self, rollout: Sampled, gaps: PerToken) -> PerToken: ...

    moved = [task.value for task in two_ranks(Module()).tasks if isinstance(task, Exchange)]
    assert moved == ["rollout"]


def test_ranks_that_share_an_engine_do_not_both_run_a_node_without_a_role() -> None:
    class Module(GRPO):
        @node
        def masked(self, rollout: WithLossMask) -> PerSample: ...

    assert two_ranks(Module(), Layout(BOTH, 1)).layouts()["masked"] == GROUPS


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
        ["broadcast", "rows", "of", "rollout"],  # to rank 1, which has no part in making them
        ["exchange", "rollout"],
        ["run", "rewards"],
        ["run", "advantages"],
        ["exchange", "advantages"],
        ["reduce", "metrics"],
    ]
    assert second == [
        ["sync", "actor", "->", "rollout"],
        ["broadcast", "rows", "of", "rollout"],
        ["exchange", "rollout"],
        ["run", "ref_logprobs"],
        ["run", "old_logprobs"],
        ["exchange", "advantages"],
        ["train", "actor_loss"],
        ["reduce", "metrics"],
    ]


class ReadsTexts(GRPO):
    """Rewards of texts, and of a value that is made where the actor trains."""

    @node
    def rewards(self, rollout: WithTexts, old_logprobs: PerToken) -> PerSample: ...


def test_a_node_that_reads_texts_runs_where_they_were_made() -> None:
    layouts = {
        "actor.rollout": Layout((0, 1), 2),
        "actor": Layout((2, 3), 2, "balanced"),
        "reference": Layout((2, 3), 2),
    }
    planned = plan(Graph.read(ReadsTexts(), ROLES), layouts, world_size=4)
    assert planned.layouts()["rewards"] == Layout((0, 1), 2)


def test_a_task_prints_all_that_distinguishes_it_from_another() -> None:
    layout = Layout((0, 1, 4, 5), 2, "balanced", 64)
    task = str(Exchange("rollout", "rollout", Layout((3,), 1), layout))
    assert task == (
        "exchange  rollout: rank 3, 1 shard, groups"
        " -> ranks 0-1,4-5, 2 shards x 2 copies, balanced in updates of 64 rows; rows of rollout"
    )


def test_different_plans_have_different_digests() -> None:
    assert two_ranks(GRPO()).digest == two_ranks(GRPO()).digest
    assert two_ranks(GRPO()).digest != two_ranks(GRPO(), rollout=Layout(BOTH, 1)).digest


def test_the_digest_is_the_same_in_processes_that_hash_differently() -> None:
    code = "from tests.dag import modules, plans as t; print(hash('a'), t.two_ranks(modules.ReMax()).digest)"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", code]
    hashed, digest = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert int(hashed) != hash("a")
    assert digest == two_ranks(ReMax()).digest
