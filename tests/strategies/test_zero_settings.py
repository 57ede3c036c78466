"""Settings of ZeRO that trade memory for time change no result, or are refused where they cannot work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlflow.errors import UserError
from rlflow.models.causal_lm import CausalLM
from rlflow.models.optimizer import Optimizer
from rlflow.strategies.deepspeed import DeepSpeedStrategy
from rlflow.values.layout import Layout
from tests.ranks import RankPool
from tests.strategies.divided_models import max_live_parameters, updates_with
from tests.strategies.reference import distance, plain_update
from tests.strategies.strategy_update import Stage, launch

SGD = Optimizer(name="sgd", lr=0.1, gradient_clipping=0.5)


def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.fixture(scope="module")
def expected(tiny: Path) -> dict[str, Tensor]:
    return plain_update(tiny, sgd, 0.5, updates=2)[2]


@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        (2, {"reduce_bucket_size": 1001}),
        (3, {"reduce_bucket_size": 1001, "max_live_parameters": 1}),
        (3, {"max_live_parameters": 10**9}),
    ],
)
def test_limits_change_no_result(
    stage: int, settings: dict[str, Any], tiny: Path, ranks2: RankPool, expected: dict[str, Tensor]
) -> None:
    for weights in ranks2.run(updates_with, tiny, stage, SGD, settings):
        assert distance(weights, expected) < 1e-6


def test_weights_divided_once_more_within_a_node_train_alike(
    tiny: Path, ranks4: RankPool, expected: dict[str, Tensor]
) -> None:
    for weights, reference, second in ranks4.run(updates_with, tiny, 3, SGD, {"hpz_partition_size": 2}, True):
        assert second
        assert distance(weights, expected) < 1e-6
        before = dict(AutoModelForCausalLM.from_pretrained(tiny).named_parameters())
        assert all(torch.equal(weight, before[name]) for name, weight in reference.items())


def group_sizes(stage: Stage, setting: str) -> list[int | None]:
    groups = launch(stage, **{setting: 2})._groups_of("actor")
    return [None if group is None else group.size() for group in (groups.within, groups.across)]


@pytest.mark.parametrize(
    ("stage", "setting", "across"),
    [(3, "hpz_partition_size", None), ("fsdp", "hsdp_shard_size", 2)],
    ids=["deepspeed", "fsdp"],
)
def test_fsdp_alone_forms_groups_of_the_ranks_that_hold_the_same_parts(
    stage: Stage, setting: str, across: int | None, ranks4: RankPool
) -> None:
    assert ranks4.run(group_sizes, stage, setting) == [[2, across]] * 4


def test_as_many_weights_are_whole_at_a_time_as_the_largest_layer_has(tiny: Path, ranks2: RankPool) -> None:
    sizes = [parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(tiny).model.layers[0].parameters()]
    layer = sum(sizes)
    for (least, most), (_, most_of_all) in zip(
        ranks2.run(max_live_parameters, tiny, None), ranks2.run(max_live_parameters, tiny, 10**9), strict=True
    ):
        assert 0 < least <= most <= layer + max(sizes)
        assert most_of_all > 1.5 * layer


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"stage": 2, "max_live_parameters": 5}, "`max_live_parameters` is 5, and `stage` is 2"),
        ({"stage": 1, "offload_param": True}, "`offload_param` is True, and `stage` is 1"),
        ({"stage": 3, "hpz_partition_size": 1}, "`hpz_partition_size` is 1; give 2 or more"),
        ({"stage": 3, "reduce_bucket_size": 0}, "`reduce_bucket_size` is 0; give 1 or more"),
        ({"stage": 3, "max_live_parameters": -1}, "`max_live_parameters` is -1; give 1 or more"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(settings: dict[str, Any], refusal: str) -> None:
    with pytest.raises(UserError, match=refusal):
        DeepSpeedStrategy(**settings)


def test_ranks_that_are_not_a_multiple_are_refused_for_training_but_not_an_engine() -> None:
    strategy = DeepSpeedStrategy(3, hpz_partition_size=2)
    roles = {"actor": CausalLM("tiny")}
    strategy.check_roles(roles, {"actor": Layout((0, 1, 2, 3), 4), "rollout": Layout((4, 5, 6), 3)})
    with pytest.raises(UserError, match=r"^`hpz_partition_size` is 2, and `actor` lives on 3 ranks"):
        strategy.check_roles(roles, {"actor": Layout((0, 1, 2), 3)})


def test_ranks_that_cannot_be_taken_within_nodes_are_refused() -> None:
    strategy = DeepSpeedStrategy(3, hpz_partition_size=2)
    strategy._layouts = {"actor": Layout((2, 3, 4, 5), 4)}
    strategy.processes.parallel_devices = [torch.device("cpu")] * 8
    strategy._refuse_across_nodes("actor")  # one node
    strategy.processes.parallel_devices = [torch.device("cpu")] * 3
    with pytest.raises(UserError, match=r"^`hpz_partition_size` is 2, and `actor` lives on 4 ranks, 3 to a node"):
        strategy._refuse_across_nodes("actor")
