"""Where the rows of each role lie."""

from __future__ import annotations

import pytest

from rlflow import Pairs, Rollout, UserError, node
from rlflow.algorithms import GRPO, RewardModelTraining
from rlflow.data.layout import Layout
from rlflow.placement import Machines, followed_role, layouts
from rlflow.preparation import read_graph
from tests.controller.runs import OddCharacters


def grpo(**settings: object) -> GRPO:
    return GRPO("tiny", OddCharacters(), kl_coef=0.1, **settings)  # type: ignore[arg-type]


def test_a_scored_role_holds_the_rows_of_the_trained_one() -> None:
    module = grpo(samples_per_update=16)
    placed = layouts(module, read_graph(module), Machines(1, 4), tensor_parallel_size=1)
    assert placed["reference"] == placed["actor"] == Layout((0, 1, 2, 3), 4, "balanced", 16)


def test_the_ranks_of_an_engine_share_whole_groups() -> None:
    module = grpo()
    placed = layouts(module, read_graph(module), Machines(1, 4), tensor_parallel_size=2)
    assert placed["rollout"] == Layout((0, 1, 2, 3), 2, "groups")


def test_ranks_that_do_not_divide_into_engines_are_refused() -> None:
    module = grpo()
    with pytest.raises(UserError, match=r"`rollout.init_args.tensor_parallel_size` is 4, .* 6 ranks .* \[1, 2, 3, 6\]"):
        layouts(module, read_graph(module), Machines(1, 6), tensor_parallel_size=4)


def test_the_engine_follows_the_trained_role() -> None:
    module = grpo()
    assert followed_role(module, read_graph(module)) == "actor"


def test_a_graph_that_trains_nothing_is_refused() -> None:
    module = grpo()
    module.actor_loss = None  # type: ignore[assignment]
    with pytest.raises(UserError, match="no node of GRPO trains a model"):
        followed_role(module, read_graph(module))


def test_an_algorithm_without_a_trained_language_model_has_none_to_follow() -> None:
    module = RewardModelTraining("tiny")
    assert followed_role(module, read_graph(module)) is None


class Samples(RewardModelTraining):
    @node(role="rollout")
    def rollout(self, batch: Pairs) -> Rollout: ...  # type: ignore[empty-body]


def test_to_sample_with_no_trained_language_model_is_refused() -> None:
    module = Samples("tiny")
    with pytest.raises(UserError, match="node `rollout` of Samples samples, and no node trains a CausalLM"):
        followed_role(module, read_graph(module))
