"""Which fields a node reads, by its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import pytest
from torch import Tensor

from rlflow import MoE
from rlflow.algorithms import GRPO
from rlflow.dag.graph import Graph
from rlflow.dag.node import node
from rlflow.dag.planner import plan
from rlflow.dag.reads import Fields
from rlflow.dag.tasks import Exchange
from rlflow.rewards import ExactMatch
from rlflow.run.prepare import read_graph
from rlflow.values.batch import Batch
from rlflow.values.cuts import PerSample, PerToken
from rlflow.values.layout import Layout
from rlflow.values.ragged import Ragged
from rlflow.values.rollout import Rollout


class Counted(Protocol):
    """What `Model.count` reads."""

    @property
    def lengths(self) -> Tensor: ...


class Model:
    def count(self, rows: Counted, scale: float = 1.0) -> Tensor:
        return rows.lengths * scale


@dataclass(frozen=True)
class Parts:
    prompt: Ragged
    first: PerSample
    second: PerSample
    third: PerSample

    @property
    def both(self) -> Tensor:
        return self.first + self.second


def third_of(parts: Parts) -> Tensor:
    return parts.third


def whole(parts: Parts) -> object:
    return vars(parts)


class Reader:
    """Nodes that read `parts`, each in a way of its own."""

    model = Model()

    @node
    def parts(self, batch: Batch) -> Parts: ...

    @node
    def by_attribute(self, parts: Parts) -> PerSample:
        return next(parts.first for _ in range(1))

    @node
    def by_property(self, parts: Parts) -> PerSample:
        return parts.both

    @node
    def by_function(self, parts: Parts) -> PerSample:
        return third_of(parts=parts)

    @node
    def by_method(self, parts: Parts) -> PerSample:
        return self.helper(1.0, parts)

    @node
    def by_name(self, parts: Parts) -> PerSample:
        other = parts
        return other.first

    @node
    def by_unknown(self, parts: Parts) -> PerSample:
        whole(parts)
        return parts.first

    @node
    def by_shadow(self, parts: Parts) -> PerSample:
        third_of = whole
        return third_of(parts)

    @node
    def by_nothing(self, parts: Parts) -> PerSample: ...

    def helper(self, scale: float, parts: Parts) -> Tensor:
        return parts.second * scale


@pytest.mark.parametrize(
    ("reader", "fields"),
    [
        ("by_attribute", {"first"}),
        ("by_property", {"first", "second"}),
        ("by_function", {"third"}),
        ("by_method", {"second"}),
        ("by_name", None),
        ("by_unknown", None),
        ("by_shadow", None),
        ("by_nothing", None),
    ],
)
def test_the_fields_that_a_node_reads(reader: str, fields: set[str] | None) -> None:
    assert Graph.read(Reader()).fields[reader, "parts"] == fields


def test_a_function_reads_what_its_protocol_names() -> None:
    class Counting(Reader):
        @node
        def by_attribute(self, rollout: Rollout) -> PerSample:
            return self.model.count(rollout)

        @node(role="rollout")
        def rollout(self, batch: Batch) -> Rollout: ...

    assert Graph.read(Counting()).fields["by_attribute", "rollout"] == {"lengths"}


def test_readers_of_one_layout_get_the_fields_that_any_of_them_reads() -> None:
    graph = Graph.read(Reader())
    first, both, third, all_of_it = (
        graph.nodes[name] for name in ("by_attribute", "by_property", "by_function", "by_name")
    )
    assert graph.columns("parts", [first, third]) == ("first", "third")
    assert graph.columns("parts", [first, both]) == ("first", "second")
    assert graph.columns("parts", [first, all_of_it]) is None


def test_grpo_sends_the_actor_what_it_scores_compares_and_masks() -> None:
    graph = read_graph(GRPO(model="tiny", reward=ExactMatch()))
    layouts = {"rollout": Layout((0,), 1), "actor": Layout((1,), 1, "balanced")}
    exchanges = [task for task in plan(graph, layouts, 2).tasks if isinstance(task, Exchange)]
    (of_rollout,) = [task for task in exchanges if task.value == "rollout"]
    # neither `finished` nor `group` nor the dataset's rows: those are read where they were made
    assert of_rollout.columns == ("prompt_ids", "response_ids", "loss_mask", "lengths", "logprobs", "version")
    assert "; only prompt_ids, response_ids" in str(of_rollout)


def test_experts_are_sent_where_a_model_trains_with_those_that_the_engine_chose() -> None:
    def fields(moe: MoE | None) -> dict[tuple[str, str], Fields | None]:
        module = GRPO(model="tiny", reward=ExactMatch(), kl_coef=0.1, moe=moe)
        return read_graph(module).fields

    replayed = fields(MoE(routing_replay=True))
    assert "experts" in (replayed["actor_loss", "rollout"] or ())
    assert "experts" not in (replayed["ref_logprobs", "rollout"] or ())
    assert not any("experts" in (read or ()) for read in fields(MoE(freeze_router=True)).values())


def test_a_stub_and_a_bare_tensor_come_as_a_whole() -> None:
    class Stub(Reader):
        @node
        def by_attribute(self, by_property: PerToken) -> PerSample:
            return by_property.sum(1)

        @node
        def by_property(self, parts: Parts) -> PerToken:
            """Says nothing."""

    assert Graph.read(Stub()).fields["by_attribute", "by_property"] is None
    assert Graph.read(Stub()).fields["by_property", "parts"] is None
