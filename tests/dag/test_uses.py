"""Handles that a node calls in addition to its role's: their names in the mark, and their ranks."""

from __future__ import annotations

import pytest

from rlflow import CausalLM, UserError, ValueModel
from rlflow.dag.graph import Graph, GraphError
from rlflow.dag.node import node
from rlflow.module import RLModule
from rlflow.run.placement import Place, Placed, layouts
from rlflow.values.batch import Batch
from rlflow.values.column_kinds import PerSample, PerToken
from rlflow.values.layout import Layout

HANDLES = ("actor", "teacher", "other")


class Distilled(RLModule):
    def configure_models(self) -> None:
        self.actor = CausalLM("tiny", samples_per_update=4)
        self.teacher = CausalLM("tiny", trainable=False)
        self.other = CausalLM("tiny", trainable=False)

    @node(role="actor", type="train", uses=("teacher", "other"))
    def actor_loss(self, batch: Batch) -> PerToken: ...


def test_a_node_names_one_handle_or_several_and_all_are_roles_of_the_graph() -> None:
    class One(Distilled):
        @node(role="actor", type="train", uses="teacher")
        def actor_loss(self, batch: Batch) -> PerToken: ...

    graph = Graph.read(One(), HANDLES)
    assert graph.nodes["actor_loss"].uses == ("teacher",)
    assert list(graph.roles()) == ["actor", "teacher"]
    graph = Graph.read(Distilled(), HANDLES)
    assert list(graph.roles()) == ["actor", "teacher", "other"]
    assert graph.trained_roles() == ("actor",)


class Wrong(Distilled):
    @node(uses="teacher")
    def alone(self, batch: Batch) -> PerSample: ...

    @node(role="actor", uses="critic")
    def unknown(self, batch: Batch) -> PerSample: ...

    @node(role="teacher", uses="teacher")
    def itself(self, batch: Batch) -> PerSample: ...

    @node(role="teacher", uses="actor")
    def trained(self, batch: Batch) -> PerSample: ...


def test_what_a_node_cannot_use_is_reported_with_the_other_problems() -> None:
    with pytest.raises(GraphError) as error:
        Graph.read(Wrong(), HANDLES)
    found = [problem.message for problem in error.value.problems]
    assert found[0].startswith("`alone` uses `teacher` and has no role; a model is called on the ranks of another.")
    assert found[1].startswith("`unknown` uses `critic`, which names no model handle of the module. The handles are")
    assert found[2] == "`itself` uses `teacher`, which is its role. Leave it out of `uses`"
    assert found[3].startswith("`trained` uses `actor`, which `actor_loss` (tests/dag/test_uses.py:")
    assert len(found) == 4


def placed(placement: dict[str, Placed]) -> dict[str, Layout]:
    module = Distilled()
    module.configure_models()
    return layouts(module, Graph.read(module, HANDLES), 4, {"actor": 1}, placement)


def test_used_models_live_where_the_role_does() -> None:
    found = placed({"actor": Place("2-3", sequence_parallel_size=2)})
    assert found["actor"] == Layout((2, 3), 1, "balanced", 4)
    assert found["teacher"] == found["other"] == found["actor"]
    both = placed({"actor": "0-1", "teacher": "0-1"})
    assert both["teacher"] == both["actor"]


def test_a_used_model_has_the_mini_batches_of_the_role_that_uses_it() -> None:
    class AfterACritic(Distilled):
        def configure_models(self) -> None:
            self.critic = ValueModel("tiny", samples_per_update=2)
            super().configure_models()

        @node(role="critic", type="train")
        def critic_loss(self, batch: Batch) -> PerToken: ...

        @node(role="actor", type="train", uses=("teacher", "other"))
        def actor_loss(self, batch: Batch) -> PerToken: ...

    module = AfterACritic()
    module.configure_models()
    found = layouts(module, Graph.read(module, ("critic", *HANDLES)), 2, {"actor": 1})
    assert [found[role].samples_per_update for role in ("critic", "actor", "teacher")] == [2, 4, 4]


def test_a_used_model_that_is_placed_elsewhere_is_refused() -> None:
    with pytest.raises(UserError) as error:
        placed({"actor": "0-1", "teacher": "2-3"})
    assert str(error.value) == (
        "node `actor_loss` of `actor` uses `teacher`, and `placement` has ranks 0-1 in 2 shards for `actor` and"
        " ranks 2-3 in 2 shards for `teacher`; place both alike"
    )
