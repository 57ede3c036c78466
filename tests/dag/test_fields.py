"""The fields of a value that a node reads: those that the type of its parameter names, and the framework's own."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import pytest
import torch

from rlflow import Batch, CausalLM, Pairs, PerSample, PerToken, Rollout, RolloutWithTexts, UserError, node
from rlflow.algorithms import GRPO, PPO, RAFT
from rlflow.dag.graph import Graph, GraphError
from rlflow.dag.planner import plan
from rlflow.dag.tasks import Exchange
from rlflow.functional import KL
from rlflow.models.moe import MoE
from rlflow.rewards import ExactMatch
from rlflow.run.prepare import read_graph
from rlflow.types import Grouped, Ragged, Sampled, Tokens, TokensWithLossMask, WithDatasetRows, WithLossMask, WithTexts
from rlflow.values.layout import Layout
from rlflow.values.protocols import computed_from

TOKENS = {"prompt_ids", "response_ids", "lengths"}


class Own(WithLossMask, Grouped, Protocol):
    """A protocol of a user's own."""

    finished: PerSample


@dataclass(frozen=True)
class Short:
    """A dataclass of some fields."""

    prompt_ids: Ragged
    version: PerSample


class Plain:
    """A class of annotated fields."""

    logprobs: PerToken


class Bare(Grouped):
    """A protocol whose author forgot `Protocol`."""


def fields_of(annotation: Any) -> set[str]:
    """The fields that a node reads of a rollout if it asks for this type."""

    class Module:
        @node(role="rollout")
        def rollout(self, batch: Batch) -> Rollout: ...

        @node
        def reads(self, rollout: annotation) -> PerSample: ...  # type: ignore[valid-type]

    Module.reads.__annotations__ = {"rollout": annotation, "return": PerSample}
    return set(Graph.read(Module()).fields["reads", "rollout"].names)


@pytest.mark.parametrize(
    ("annotation", "fields"),
    [
        (Tokens, TOKENS),
        (WithLossMask, {"loss_mask", "lengths"}),
        (TokensWithLossMask, {*TOKENS, "loss_mask"}),
        (Sampled, {*TOKENS, "loss_mask", "logprobs", "version"}),
        (WithDatasetRows, {"rows"}),
        (
            WithTexts,
            {
                "texts",
                "messages",
                "rows",
                "prompt_ids",
                "response_ids",
                "lengths",
                "path",
                "segments",
                "turn_rewards",
                "ended",
                "branch",
                "inherited",
                "seat",
                "calls",
            },
        ),
        (Short, {"prompt_ids", "version"}),
        (Plain, {"logprobs"}),
        (Short | None, {"prompt_ids", "version"}),
    ],
)
def test_a_type_names_what_is_read(annotation: Any, fields: set[str]) -> None:
    assert fields_of(annotation) == fields


def test_a_type_of_ones_own_adds_to_those_it_derives_from() -> None:
    assert fields_of(Own) == fields_of(Grouped) | {"loss_mask", "lengths", "finished"}
    assert fields_of(Bare) == fields_of(Grouped)


SEEN_BY_NAME = ("texts", "messages", "progress", "rows", "pictures")


def test_a_rollout_with_texts_has_all_fields_but_those_of_models_alone() -> None:
    assert fields_of(RolloutWithTexts) == {*Rollout.__dataclass_fields__} - {"pictures"}


@pytest.mark.parametrize("annotation", [Rollout, Any])
def test_a_value_s_own_type_asks_for_all_but_texts_and_rows_of_the_dataset(annotation: Any) -> None:
    assert fields_of(annotation) == {name for name in Rollout.__dataclass_fields__ if name not in SEEN_BY_NAME}


@dataclass(frozen=True)
class Sides:
    left: PerSample
    right: PerSample
    other: PerSample

    @property
    @computed_from("left", "right")
    def width(self) -> PerSample:
        return self.right - self.left

    @property
    def all_of_it(self) -> PerSample:
        return self.width + self.other


class Width(Protocol):
    width: PerSample


class AllOfIt(Protocol):
    all_of_it: PerSample


class OfSides:
    @node
    def sides(self, batch: Batch) -> Sides: ...

    @node
    def wide(self, sides: Width) -> PerSample: ...

    @node
    def whole(self, sides: AllOfIt) -> PerSample: ...


def test_a_property_reads_what_it_is_computed_from_or_all_where_it_does_not_say() -> None:
    graph = Graph.read(OfSides())
    assert graph.fields["wide", "sides"].names == {"left", "right"}
    assert graph.fields["whole", "sides"].names == {"left", "right", "other"}
    assert graph.columns("sides", [graph.nodes["wide"]]) == ("left", "right")
    assert graph.columns("sides", [graph.nodes["wide"], graph.nodes["whole"]]) is None


class Judged(Protocol):
    text: list[str]
    group: PerToken


def test_a_field_that_a_value_does_not_have_or_has_as_another_type_is_one_line_each() -> None:
    with pytest.raises(GraphError) as error:
        fields_of(Judged)
    first, second = [line for line in str(error.value).splitlines() if "`reads`" in line]
    assert (
        '`reads` reads `rollout` as Judged, which names `text`, and Rollout has no such field. Did you mean "texts"?'
        in first
    )
    assert (
        "`reads` reads `rollout` as Judged, which names `group` as PerToken, and it is PerSample in Rollout" in second
    )


def test_a_batch_lacks_what_only_samples_have() -> None:
    class Module:
        @node
        def reads(self, batch: Sampled) -> PerSample: ...

    with pytest.raises(
        GraphError, match="reads `batch` as Sampled, which names `logprobs`, and Batch has no such field"
    ):
        Graph.read(Module())


def test_a_node_sees_what_it_asks_for_and_no_more_even_on_one_rank() -> None:
    graph = Graph.read(OfSides())
    made = Sides(torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([5.0]))
    seen = graph.fields["wide", "sides"].seen(made)
    assert seen.width == 2
    with pytest.raises(UserError) as error:
        seen.other.sum()
    assert str(error.value) == (
        "`other` was not sent here; `wide` reads `sides: Width`, a type that does not ask for it. Write `sides: Sides`,"
        " or a Protocol of your own that names `other` too"
    )
    assert graph.fields["whole", "sides"].seen(made) is made


def test_the_line_names_the_type_to_write() -> None:
    graph = read_graph(GRPO(CausalLM("tiny"), reward=ExactMatch()))
    read = graph.fields["advantages", "rollout"]
    fields: dict[str, Any] = dict.fromkeys(Rollout.__dataclass_fields__)
    seen = read.seen(Rollout(**fields))
    line = "`advantages` reads `rollout: Grouped`, a type that does not ask for it. Write `rollout: {}`, or a"
    with pytest.raises(UserError, match=line.format("RolloutWithTexts")):
        len(seen.texts)
    with pytest.raises(UserError, match=line.format("Rollout")):
        len(seen.lengths)


def test_grpo_sends_the_actor_what_it_scores_compares_and_masks() -> None:
    graph = read_graph(GRPO(CausalLM("tiny"), reward=ExactMatch()))
    layouts = {"actor.rollout": Layout((0,), 1), "actor": Layout((1,), 1, "balanced")}
    exchanges = [task for task in plan(graph, layouts, 2).tasks if isinstance(task, Exchange)]
    (of_rollout,) = [task for task in exchanges if task.value == "rollout"]
    # neither `finished` nor `group` nor the dataset's rows: those are read where they were made
    assert of_rollout.columns == ("prompt_ids", "response_ids", "loss_mask", "lengths", "logprobs", "version")
    assert "; only prompt_ids, response_ids" in str(of_rollout)


def test_what_the_framework_reads_is_listed_with_its_reason() -> None:
    fields = read_graph(PPO(CausalLM("tiny"), reward=ExactMatch(), kl=KL(0.1))).fields
    assert str(fields["old_logprobs", "rollout"]) == (
        "prompt_ids, response_ids, lengths; compared with the engine's logprobs: loss_mask, logprobs, version"
    )
    assert str(fields["ref_logprobs", "rollout"]) == "prompt_ids, response_ids, lengths"
    assert "logprobs" not in fields["critic_loss", "rollout"].names, "no engine has the critic's"
    assert str(fields["rollout", "batch"]).endswith("; samples carry it on: rows")


def test_a_node_that_makes_rows_of_others_has_their_pictures_to_carry_on() -> None:
    read = read_graph(RAFT(CausalLM("tiny"), reward=ExactMatch())).fields["best", "rollout"]
    assert str(read).endswith("; rows carry it on: pictures")


def test_a_loss_reads_the_tokens_and_the_mask_whatever_its_type_names() -> None:
    class Module:
        actor = SimpleNamespace()

        @node(role="actor", type="train")
        def actor_loss(self, batch: Tokens) -> PerToken: ...

    read = Graph.read(Module(), ("actor",)).fields["actor_loss", "batch"]
    assert str(read) == "prompt_ids, response_ids, lengths; a loss is of it: loss_mask"

    class OfPairs(Module):
        def actor_loss(self, batch: Pairs) -> PerSample: ...

    assert "rows" not in Graph.read(OfPairs(), ("actor",)).fields["actor_loss", "batch"].names


def test_experts_are_sent_where_a_model_trains_with_those_that_the_engine_chose() -> None:
    def read(moe: MoE | None) -> dict[tuple[str, str], Any]:
        return dict(read_graph(GRPO(CausalLM("tiny", moe=moe), reward=ExactMatch(), kl=KL(0.1))).fields)

    replayed = read(MoE(routing_replay=True))
    assert "experts" in replayed["actor_loss", "rollout"].names
    assert "experts" not in replayed["ref_logprobs", "rollout"].names
    assert not any("experts" in each.names for each in read(MoE(freeze_router=True)).values())
