"""The types of values, along edges and of the batch."""

from __future__ import annotations

from typing import Any

from rlflow.dag.graph import Graph
from rlflow.dag.node import node
from rlflow.values.batch import Batch, Pairs
from rlflow.values.column_kinds import PerSample, PerToken
from rlflow.values.rollout import Rollout
from tests.dag.modules import GRPO, ROLES, SFT
from tests.dag.problems import problems


def test_types_must_agree_along_an_edge() -> None:
    class Module(GRPO):
        def advantages(self, rollout: Rollout, rewards: PerSample) -> PerToken: ...

    (problem,) = problems(Module())
    assert problem.startswith("`actor_loss` reads `advantages` as PerSample, but `advantages` returns PerToken (")


def test_an_optional_input_is_checked_without_its_none() -> None:
    class Module(GRPO):
        def old_logprobs(self, rollout: Rollout) -> PerSample: ...

    (problem,) = problems(Module())
    assert problem.startswith("`actor_loss` reads `old_logprobs` as PerToken | None, but")


def test_the_batch_is_a_batch() -> None:
    class Module(SFT):
        def actor_loss(self, batch: Rollout) -> PerToken: ...

    assert problems(Module()) == ["`actor_loss` reads `batch` as Rollout, but it is a Batch, or Pairs. Correct it"]


def test_a_value_that_cannot_be_cut_is_refused() -> None:
    class Module(GRPO):
        def rewards(self, rollout: Rollout) -> list[float]: ...

        def advantages(self, rollout: Rollout, rewards: Any) -> PerSample: ...

    (problem,) = problems(Module())
    assert problem.startswith("`rewards` returns list[float], which cannot be cut by rows: ")


def test_a_type_that_is_not_imported_is_reported() -> None:
    class Module(SFT):
        @node
        def a(self, batch: Batch) -> Unknown: ...  # noqa: F821

    assert problems(Module()) == [
        "the types of `a` cannot be read: name 'Unknown' is not defined. Import or correct them"
    ]


class DPO:
    @node(role="reference")
    def ref_logprobs(self, batch: Pairs) -> PerSample: ...

    @node(role="actor", type="train")
    def actor_loss(self, batch: Pairs, ref_logprobs: PerSample) -> PerSample: ...


def test_the_readers_of_batch_say_whether_it_is_pairs() -> None:
    class Indifferent(DPO):
        @node
        def a(self, batch: Any) -> PerSample: ...

    assert Graph.read(Indifferent(), ROLES).type_of("batch") is Pairs
    assert Graph.read(SFT(), ROLES).type_of("batch") is Batch


def test_the_readers_of_batch_agree_on_its_type() -> None:
    class Module(DPO):
        @node
        def a(self, batch: Batch) -> PerSample: ...

    (problem,) = problems(Module())
    assert problem.startswith("`a` reads `batch` as Batch, but `ref_logprobs` reads it as Pairs (")
    assert problem.endswith("). Make them agree")


def test_nothing_of_a_pair_is_per_token() -> None:
    class Module(DPO):
        @node
        def a(self, ref_logprobs: PerSample) -> PerToken: ...

        @node(role="actor", type="train")
        def actor_loss(self, batch: Pairs, ref_logprobs: PerSample) -> PerToken: ...

    of_pairs = "returns PerToken of pairs, and a pair has the tokens of two responses"
    assert problems(Module()) == [
        f"`{name}` {of_pairs}. Return one number or vector for each pair, `-> PerSample`"
        for name in ("a", "actor_loss")
    ]
