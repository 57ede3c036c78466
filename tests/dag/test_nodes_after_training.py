"""Nodes that come after a train node: their order, their plan, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from rlflow import Batch, CausalLM, PerSample, PerToken, RLModule, Rollout, UserError, node
from rlflow.dag.graph import Graph
from rlflow.dag.planner import plan
from rlflow.dag.tasks import Sleep, SyncWeights, TrainNode
from rlflow.run.prepare import read_graph
from rlflow.types import After
from rlflow.values.layout import Layout
from tests.dag.modules import GRPO, Filtered
from tests.dag.plans import BALANCED, BOTH, GROUPS
from tests.dag.problems import problems

ROLES = ("actor", "reference", "judge")
LAYOUTS = {"actor.rollout": GROUPS, "actor": BALANCED, "reference": BALANCED, "judge": BALANCED}


class Judged(GRPO):
    """The judge is trained along, and what it says after counts."""

    ref_logprobs = old_logprobs = None

    @node(role="judge", type="train")
    def judge_loss(self, rollout: Rollout) -> PerSample: ...

    @node(role="judge")
    def before(self, rollout: Rollout) -> PerSample: ...

    @node(role="judge")
    def rewards(self, rollout: Rollout, judge_loss: After) -> PerSample: ...


class Twice(GRPO):
    """The policy generates again when it has been trained."""

    ref_logprobs = None

    @node(role="actor", type="train")
    def first_loss(self, rollout: Rollout) -> PerToken: ...

    @node(generates="actor")
    def again(self, batch: Batch, first_loss: After) -> Rollout: ...

    @node(role="actor")
    def again_logprobs(self, again: Rollout) -> PerToken: ...

    @node(role="actor", type="train")
    def last_loss(self, again: Rollout, again_logprobs: PerToken) -> PerToken: ...


class Followed(RLModule):
    """An average of the policy scores before the policy learns, and after."""

    def __init__(self) -> None:
        self.actor = CausalLM("tiny")
        self.reference = self.actor.initial()

    def configure_models(self) -> None:
        self.teacher = self.actor.averaged(0.9)

    @node(role="rollout")
    def rollout(self, batch: Batch) -> Rollout: ...

    @node(role="actor", type="train")
    def actor_loss(self, rollout: Rollout) -> PerToken: ...

    @node
    def first(self, rollout: Rollout) -> PerSample: ...

    @node(role="teacher")
    def early(self, rollout: Rollout, first: PerSample) -> PerToken: ...

    @node(role="reference", uses="teacher")
    def beside(self, rollout: Rollout, early: PerToken) -> PerToken: ...

    @node(role="teacher")
    def after(self, rollout: Rollout, actor_loss: After) -> PerToken: ...

    @node(role="teacher")
    def late(self, rollout: Rollout, after: PerToken) -> PerToken: ...


class Sampled(RLModule):
    """An average of the policy samples before the policy learns, and after."""

    def __init__(self) -> None:
        self.actor = CausalLM("tiny")

    def configure_models(self) -> None:
        self.teacher = self.actor.averaged(0.9)

    @node(generates="teacher")
    def rollout(self, batch: Batch) -> Rollout: ...

    @node(role="actor", type="train")
    def first_loss(self, rollout: Rollout) -> PerToken: ...

    @node
    def first(self, rollout: Rollout, first_loss: After) -> PerSample: ...

    @node(role="actor", type="train")
    def actor_loss(self, rollout: Rollout, first: PerSample) -> PerToken: ...

    @node(generates="teacher")
    def early(self, batch: Batch) -> Rollout: ...

    @node(generates="teacher")
    def late(self, batch: Batch, actor_loss: After) -> Rollout: ...


def order(module: object) -> list[str]:
    return [node.id for node in Graph.read(module, ROLES, policies=("actor", "reference")).order]


def test_a_train_node_follows_what_uses_its_role_and_precedes_its_readers() -> None:
    assert order(Judged()) == ["rollout", "before", "judge_loss", "rewards", "advantages", "actor_loss"]


def test_nodes_not_after_a_training_run_with_the_weights_of_the_steps_start() -> None:
    found = order(Twice())
    assert (
        found.index("old_logprobs") < found.index("first_loss") < found.index("again") < found.index("again_logprobs")
    )
    assert found[-2:] == ["actor_loss", "last_loss"]


def test_nodes_not_after_the_owner_s_training_see_the_average_of_the_steps_start() -> None:
    found = [each.id for each in read_graph(Followed()).order]
    assert found == ["rollout", "first", "early", "beside", "actor_loss", "after", "late"]


def test_weights_that_were_trained_are_synced_to_the_engine_again() -> None:
    tasks = plan(Graph.read(Twice(), ROLES, policies=("actor",)), LAYOUTS, world_size=2).tasks
    words = [task for task in tasks if isinstance(task, SyncWeights | Sleep | TrainNode)]
    assert [type(task) for task in words[:6]] == [SyncWeights, Sleep, TrainNode, SyncWeights, Sleep, TrainNode]
    assert words[3] == SyncWeights("actor", BOTH, BOTH, changed=1)
    assert str(words[3]) == "sync      actor -> rollout: ranks 0-1; changed in this step"


def test_an_engine_apart_stays_awake_and_gets_trained_weights_too() -> None:
    layouts = {"actor.rollout": Layout((0,), 1), "actor": Layout((1,), 1, "balanced")}
    tasks = plan(Graph.read(Twice(), ROLES, policies=("actor",)), layouts, world_size=2).tasks
    assert [task.changed for task in tasks if isinstance(task, SyncWeights)] == [0, 1]
    assert not any(isinstance(task, Sleep) for task in tasks)


def test_an_average_comes_to_its_engine_when_all_training_of_its_owner_is_done() -> None:
    graph = read_graph(Sampled())
    assert [each.id for each in graph.order] == ["rollout", "early", "first_loss", "first", "actor_loss", "late"]
    assert graph.changed_roles() == ("actor", "teacher")
    assert [graph.changed_before(each)["teacher"] for each in graph.order] == [0, 0, 0, 0, 0, 1]
    apart = Layout((1,), 1, "balanced")
    layouts = {"teacher.rollout": Layout((0,), 1), "actor": apart, "teacher": apart}
    tasks = plan(graph, layouts, world_size=2).tasks
    syncs = [task for task in tasks if isinstance(task, SyncWeights)]
    assert syncs == [SyncWeights("teacher", (1,), (0,)), SyncWeights("teacher", (1,), (0,), changed=1)]
    assert tasks.index(syncs[1]) > max(tasks.index(task) for task in tasks if isinstance(task, TrainNode))


def test_the_training_of_another_model_syncs_no_weights_again() -> None:
    tasks = plan(Graph.read(Judged(), ROLES, policies=("actor",)), LAYOUTS, world_size=2).tasks
    assert [task.changed for task in tasks if isinstance(task, SyncWeights)] == [0]


def test_a_removed_training_is_not_waited_for_where_it_is_optional() -> None:
    class Module(Judged):
        judge_loss = None

        @node(role="judge")
        def rewards(self, rollout: Rollout, judge_loss: After | None = None) -> PerSample: ...

    assert Graph.read(Module(), ROLES).nodes["rewards"].after == ()


def test_after_something_other_than_a_train_node_is_reported() -> None:
    class Module(Judged):
        @node(role="judge")
        def rewards(self, rollout: Rollout, before: After) -> PerSample: ...

    assert problems(Module(), ROLES) == [
        "`rewards` comes after `before`, read as After, and that is not a train node. Those are actor_loss, judge_loss."
    ]


def test_a_loss_read_as_a_value_is_an_error_that_says_how_to_come_after_it() -> None:
    class Module(Judged):
        @node(role="judge")
        def rewards(self, rollout: Rollout, judge_loss: PerSample) -> PerSample: ...

    (problem,) = problems(Module(), ROLES)
    assert problem.endswith("Compute what is shared in another node, or write `judge_loss: After` to come after it")


def test_a_cycle_through_a_training_is_reported() -> None:
    class Direct(Judged):
        @node(role="judge", type="train")
        def judge_loss(self, rollout: Rollout, rewards: PerSample) -> PerSample: ...

    (problem,) = problems(Direct(), ROLES)
    assert problem == "`rewards` waits for itself: `rewards` -> `judge_loss` -> `rewards`. Break the cycle"

    class Through(Judged):  # each waits for what uses its model at the step's start, which waits for the other
        @node(role="reference", type="train")
        def ref_loss(self, rollout: Rollout) -> PerSample: ...

        @node(role="reference")
        def of_judge(self, rollout: Rollout, judge_loss: After) -> PerSample: ...

        @node(role="judge")
        def of_reference(self, rollout: Rollout, ref_loss: After) -> PerSample: ...

    (problem,) = problems(Through(), ROLES)
    assert problem.endswith(
        ". A train node that is read as After comes after what uses its role before. Break the cycle"
    )


def test_nothing_is_trained_in_what_a_filter_repeats() -> None:
    class Module(Filtered):
        @node(role="actor", type="train")
        def early_loss(self, rollout: Rollout) -> PerToken: ...

        @node(type="filter")
        def useful(self, rollout: Rollout, early_loss: After) -> PerSample: ...

    (problem,) = problems(Module(), ROLES)
    assert problem.startswith("`early_loss` trains, and the filter `useful` comes after it, which is asked once a draw")


@pytest.mark.parametrize("kind", [Twice, Judged])
def test_what_is_generated_after_a_training_cannot_run_ahead(kind: Any) -> None:
    layouts = {**dict.fromkeys(ROLES, Layout((1,), 1, "balanced")), "actor.rollout": Layout((0,), 1)}
    graph = Graph.read(kind(), ROLES, policies=("actor",))
    if kind is Judged:
        assert plan(graph, layouts, world_size=2, max_staleness=1).max_staleness == 1
        return
    with pytest.raises(UserError) as refused:
        plan(graph, layouts, world_size=2, max_staleness=1)
    assert str(refused.value) == (
        "`trainer.max_staleness` is set and `again` generates after `first_loss` has trained, so it cannot run ahead of"
        " training; leave `max_staleness` out, or generate without it"
    )


def test_of_several_trainings_before_a_generation_the_first_is_named() -> None:
    class Module(Twice):
        @node(role="actor", type="train")
        def first_loss(self, rollout: Rollout) -> PerToken: ...

        b_loss = c_loss = d_loss = e_loss = f_loss = first_loss  # six, as one of two would often be the first by chance

        @node(generates="actor")
        def again(
            self,
            f_loss: After,
            e_loss: After,
            d_loss: After,
            c_loss: After,
            b_loss: After,
            batch: Batch,
            first_loss: After,
        ) -> Rollout: ...

    layouts = {**dict.fromkeys(ROLES, Layout((1,), 1, "balanced")), "actor.rollout": Layout((0,), 1)}
    with pytest.raises(UserError, match="`again` generates after `first_loss` has trained"):
        plan(Graph.read(Module(), ROLES, policies=("actor",)), layouts, world_size=2, max_staleness=1)
