"""The rows of values: a tree; a node reads one level of it."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any

import pytest

from rlflow.dag.graph import Graph
from rlflow.dag.node import node
from rlflow.types import Each, Grouped, NewRows
from rlflow.values.batch import Batch, Pairs
from rlflow.values.column_kinds import PerSample, PerToken, Scalar
from rlflow.values.rollout import Rollout
from tests.dag.modules import GRPO, ROLES, ReMax
from tests.dag.problems import problems


def test_values_keep_the_rows_of_what_they_read() -> None:
    spaces = {step.id: step.space for step in Graph.read(ReMax(), ROLES).order}
    assert spaces == {
        "rollout": "rollout",
        "rewards": "rollout",
        "old_logprobs": "rollout",
        "greedy": "greedy",
        "greedy_rewards": "greedy",
        "baseline": "batch",  # reads `greedy_rewards` as Each
        "advantages": "rollout",  # reads `rewards` of samples and `baseline` of prompts
        "actor_loss": "rollout",
    }


def test_samples_of_two_rollouts_cannot_be_mixed() -> None:
    class Module(GRPO):
        @node(role="rollout")
        def other(self, batch: Batch) -> Rollout: ...

        def advantages(self, rewards: PerSample, other: Rollout) -> PerSample: ...

    assert problems(Module()) == [
        "`advantages` mixes rows of `rollout` (in `rewards`) and of `other` (in `other`), and neither are below"
        " the others. Read one as `Each` in a node above both, or join them in a node that returns `NewRows`"
    ]


def test_one_number_of_another_rollout_may_be_read() -> None:
    class Module(GRPO):
        @node(role="rollout")
        def other(self, batch: Batch) -> Rollout: ...

        @node
        def mean_length(self, other: Rollout) -> Scalar: ...

        def advantages(self, rewards: PerSample, mean_length: Scalar) -> PerSample: ...

    assert Graph.read(Module(), ROLES).nodes["advantages"].space == "rollout"


class Tree(GRPO):
    """Samples of samples, and also samples of prompts."""

    @node(generates="actor")
    def again(self, rollout: Rollout) -> Rollout: ...

    @node
    def better(self, again: Rollout, rewards: PerSample) -> PerSample: ...


def test_a_node_that_generates_makes_rows_below_those_that_it_reads() -> None:
    graph = Graph.read(Tree(), ROLES)
    assert graph.levels("again") == ("batch", "rollout", "again")
    assert (graph.nodes["again"].inside, graph.nodes["again"].space) == ("rollout", "again")
    assert graph.nodes["better"].space == "again"  # `rewards` of samples are seen beside each sample of theirs


def test_rows_of_two_branches_are_not_read_together() -> None:
    class Module(Tree):
        @node(generates="actor")
        def other(self, rollout: Rollout) -> Rollout: ...

        @node
        def both(self, other: Rollout, better: PerSample, rewards: PerSample) -> PerSample: ...

    assert problems(Module()) == [
        "`both` mixes rows of `other` (in `other`) and of `again` (in `better`), and neither are below the others."
        " Read one as `Each` in a node above both, or join them in a node that returns `NewRows`"
    ]


class Pairing(GRPO):
    """Values of samples read by nodes of prompts, and rows made of them."""

    advantages = actor_loss = None

    @node
    def best(self, batch: Batch, rewards: Each[PerSample]) -> PerSample: ...

    @node
    def pairs(self, batch: Grouped, rollout: Each[Rollout], best: PerSample) -> NewRows[Pairs]: ...

    @node
    def margins(self, pairs: Pairs, best: PerSample) -> PerSample: ...

    @node(role="actor", type="train")
    def pair_loss(self, pairs: Pairs, margins: PerSample) -> PerSample: ...


def test_a_node_stands_where_it_reads_plainly_and_what_it_makes_is_below() -> None:
    graph = Graph.read(Pairing(), ROLES)
    assert {name: graph.nodes[name].inside for name in ("best", "pairs", "margins", "pair_loss")} == {
        "best": "batch",
        "pairs": "batch",
        "margins": "pairs",
        "pair_loss": "pairs",
    }
    assert graph.levels("pairs") == ("batch", "pairs")
    assert graph.nodes["pairs"].returns is Pairs


def test_an_optional_value_may_be_read_of_each_row() -> None:
    class Module(Pairing):
        rewards = None

        def best(self, batch: Batch, rewards: Each[PerSample] | None = None) -> PerSample: ...

    assert Graph.read(Module(), ROLES).nodes["best"].reads == ("batch",)


def test_a_value_read_as_each_is_checked_by_its_own_type() -> None:
    class Module(Pairing):
        def best(self, batch: Batch, rewards: Each[PerToken]) -> PerSample: ...

    (problem,) = problems(Module())
    assert problem.startswith("`best` reads `rewards` as PerToken, but `rewards` returns PerSample (")


@dataclass(frozen=True)
class Numbers:
    x: PerSample


@pytest.mark.parametrize(
    ("reads", "returns", "line"),
    [
        (
            {"rewards": Each[PerSample]},
            PerSample,
            "reads only `Each`, such as `rewards`, so it has no rows of its own above them. Read a value of those",
        ),
        (
            {"rollout": Rollout, "rewards": Each[PerSample]},
            PerSample,
            "reads `rewards` as Each, and `rollout` of the same rows plainly. Read both plainly, or both as Each",
        ),
        (
            {"pairs": Pairs, "rewards": Each[PerSample]},
            PerSample,
            "reads `rewards` as Each, and its rows, of `rollout`, are not below those of `pairs` (in `pairs`). Read a",
        ),
        (
            {"batch": Batch, "total": Each[Scalar]},
            PerSample,
            "reads `total` as Each, and it is one number for all rows. Read it plainly",
        ),
        (
            {"batch": Batch},
            NewRows[Numbers],
            "returns NewRows[Numbers], which has no `path`, and so no row that is above a new one. Give the type a"
            " field",
        ),
        (
            {},
            NewRows[Pairs],
            "returns NewRows[Pairs] and reads no rows that the new ones are below. Read those, such as",
        ),
    ],
)
def test_a_wrong_use_of_each_or_of_new_rows_is_one_line(reads: dict[str, Any], returns: Any, line: str) -> None:
    def more(self: object, **values: Any) -> None: ...

    class Module(Pairing):
        @node
        def total(self, rewards: PerSample) -> Scalar: ...

    more.__annotations__ = {**reads, "return": returns}
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *reads)]
    more.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    Module.more = node(more)  # type: ignore[attr-defined]
    (problem,) = problems(Module())
    assert problem.removeprefix("`more` ").startswith(line)


@pytest.mark.parametrize("marks", [{"role": "actor"}, {"generates": "actor"}, {"type": "filter"}])
def test_rows_are_grown_without_a_model(marks: dict[str, Any]) -> None:
    class Module(GRPO):
        @node(**marks)
        def more(self, batch: Batch) -> NewRows[Pairs]: ...

    assert "rows are made of others without a model. Make them in a node of their own" in "".join(problems(Module()))


def test_a_loss_is_of_one_level_of_rows() -> None:
    class Below(Pairing):
        @node
        def of_pairs(self, pairs: Pairs) -> PerSample: ...

        @node(role="actor", type="train")
        def pair_loss(self, batch: Batch, of_pairs: PerSample) -> PerToken: ...

    class Above(Pairing):
        @node(role="actor", type="train")
        def pair_loss(self, pairs: Pairs, batch: Any, rewards: Each[PerSample]) -> PerSample: ...

    below = (
        "`pair_loss` trains on rows of `batch` (in `batch`) and reads `of_pairs` of rows of `pairs` below them. Read"
    )
    assert [problem for problem in problems(Below()) if problem.startswith(below)]
    above = "`pair_loss` trains and reads `rewards` as Each, and mini-batches are cut by the rows of the loss. Compute"
    assert [problem for problem in problems(Above()) if problem.startswith(above)]
