"""The ranks that have the rows of each role."""

from __future__ import annotations

import pytest

from rlflow import CausalLM, LoRA, Pairs, RewardModel, Rollout, UserError, node
from rlflow.algorithms import GRPO, RewardModelTraining
from rlflow.functional import KL
from rlflow.run.placement import followed_role, layouts
from rlflow.run.prepare import read_graph
from rlflow.settings import Place, Placed
from rlflow.values.layout import Layout
from tests.algorithm_factory import made
from tests.controller.runs import OddCharacters


def grpo(**settings: object) -> GRPO:
    return made(GRPO, "tiny", OddCharacters(), kl_coef=0.1, **settings)


def test_a_scored_role_holds_the_rows_of_the_trained_one() -> None:
    module = grpo(samples_per_update=16)
    placed = layouts(module, read_graph(module), 4, {"actor": 1})
    assert placed["reference"] == placed["actor"] == Layout((0, 1, 2, 3), 4, "balanced", 16)


def test_the_ranks_of_an_engine_share_whole_groups() -> None:
    module = grpo()
    placed = layouts(module, read_graph(module), 4, {"actor": 2})
    assert placed["actor.rollout"] == Layout((0, 1, 2, 3), 2, "groups")


def test_ranks_that_do_not_divide_into_engines_are_refused() -> None:
    module = grpo()
    with pytest.raises(UserError, match=r"`rollout.init_args.tensor_parallel_size` is 4, .* 6 ranks .* \[1, 2, 3, 6\]"):
        layouts(module, read_graph(module), 6, {"actor": 4})


def test_the_engine_follows_the_trained_role() -> None:
    module = grpo()
    assert followed_role(module, read_graph(module)) == "actor"


def test_a_graph_that_trains_nothing_is_refused() -> None:
    module = grpo()
    module.actor_loss = None  # type: ignore[assignment]
    with pytest.raises(UserError, match="no node of GRPO trains a model"):
        followed_role(module, read_graph(module))


def test_an_algorithm_without_a_trained_language_model_has_none_to_follow() -> None:
    module = RewardModelTraining(RewardModel("tiny"))
    assert followed_role(module, read_graph(module)) is None


class Samples(RewardModelTraining):
    @node(role="rollout")
    def rollout(self, batch: Pairs) -> Rollout: ...  # type: ignore[empty-body]


def test_to_sample_with_no_trained_language_model_is_refused() -> None:
    module = Samples(RewardModel("tiny"))
    with pytest.raises(UserError, match="node `rollout` of Samples samples, and no node trains a CausalLM"):
        followed_role(module, read_graph(module))


def placed_on(ranks: int, tensor_parallel_size: int = 1, **placement: Placed) -> dict[str, Layout]:
    module = grpo()
    return layouts(module, read_graph(module), ranks, {"actor": tensor_parallel_size}, placement)


def test_roles_live_on_the_ranks_that_are_named_and_the_others_on_all() -> None:
    placed = placed_on(4, rollout=0, actor=[1, "2-3"])
    assert placed["actor.rollout"] == Layout((0,), 1)
    assert placed["actor"] == Layout((1, 2, 3), 3, "balanced")
    assert placed["reference"] == Layout((0, 1, 2, 3), 4, "balanced")


def test_ranks_that_share_a_sequence_hold_one_shard() -> None:
    placed = placed_on(4, actor=Place(ranks=["2-3", 0, 1], sequence_parallel_size=2))
    assert placed["actor"] == Layout((0, 1, 2, 3), 2, "balanced")


def test_a_view_of_a_model_lives_where_the_model_does() -> None:
    module = GRPO(CausalLM("tiny", lora=LoRA(rank=2)), OddCharacters(), kl=KL(0.1))
    placed = layouts(module, read_graph(module), 4, {"actor": 1}, {"actor": [1, 2]})
    assert placed["reference"].ranks == placed["actor"].ranks == (1, 2)


@pytest.mark.parametrize(
    ("placement", "tensor_parallel_size", "said"),
    [
        ({"actr": 0}, 1, '`placement.actr` names no role of GRPO; .* Did you mean "actor"'),
        ({"actor": [4]}, 1, "`placement.actor` names the ranks 4, and the run has the ranks 0 to 3"),
        ({"actor": "3-1"}, 1, "`placement.actor` names the ranks 3-1"),
        ({"actor": []}, 1, "`placement.actor` names no ranks; name some, or leave `actor` out for all"),
        ({"actor": "first"}, 1, "`placement.actor` names the ranks 'first'; write numbers and ranges"),
        ({"actor": Place(ranks=["0-2"], sequence_parallel_size=2)}, 1, r"does not divide the 3 ranks .* \[1, 3\]"),
        ({"actor": Place(tensor_parallel_size=3)}, 1, r"is 3, which does not divide the 4 ranks .* \[1, 2, 4\]"),
        ({"actor": Place(None, 4, 2)}, 1, r"sequence_parallel_size` is 4, .* in groups of 2; use one of \[1, 2\]"),
        ({"rollout": Place(sequence_parallel_size=2)}, 1, "engines share their work by `rollout.init_args.tensor_par"),
        ({"rollout": Place(tensor_parallel_size=2)}, 1, "engines share their work by `rollout.init_args.tensor_par"),
        ({"rollout": "0-2"}, 2, "is 2, which does not divide the 3 rollout ranks"),
        ({"rollout": "0-1", "actor": "1-3"}, 2, "ranks 0-1 share an engine .* and among them only rank 1 hold `actor`"),
    ],
)
def test_what_cannot_be_placed_is_refused_in_one_line(
    placement: dict[str, Placed], tensor_parallel_size: int, said: str
) -> None:
    with pytest.raises(UserError, match=said) as error:
        placed_on(4, tensor_parallel_size, **placement)
    assert "\n" not in str(error.value)


def test_engines_are_placed_by_policy_and_the_short_name_is_for_all_others() -> None:
    module = grpo()
    sizes = {"actor": 1, "reference": 2}
    placed = layouts(module, read_graph(module), 4, sizes, {"rollout": "0-1", "actor.rollout": 3})
    assert placed["actor.rollout"] == Layout((3,), 1)
    assert placed["reference.rollout"] == Layout((0, 1), 1)
