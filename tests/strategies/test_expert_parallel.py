"""Ranks that divide the experts of each layer train as one process does, and refuse what they cannot divide."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlflow.errors import UserError
from rlflow.models.causal_lm import CausalLM
from rlflow.models.expert_parallel import check_expert_parallel
from rlflow.models.moe import MoE
from rlflow.models.optimizer import Optimizer
from rlflow.strategies import DeepSpeedStrategy, FSDPStrategy
from rlflow.testing.derivative import wide_casts
from rlflow.values.layout import Layout
from tests.families.models import write_family
from tests.families.moe import COEF, moe_update, plain_moe_update
from tests.models.test_scoring import write
from tests.ranks import RankPool
from tests.slow import slow_but
from tests.strategies.reference import distance, plain_update
from tests.strategies.state import put_together
from tests.strategies.strategy_update import Stage, check_updates
from tests.strategies.tensor_parallel import check_averages, divided_critic, divided_update, loading, train_and_save

SGD = Optimizer(name="sgd", lr=0.1, gradient_clipping=0.5)
SIZES = {"vocab_size": 121, "num_key_value_heads": 4, "num_experts_per_tok": 2, "head_dim": 8, "num_labels": 1}
FAMILIES = {
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 8, "moe_intermediate_size": 16, "norm_topk_prob": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "sliding_window": None}),
    "gpt_oss": ("GptOss", {"num_local_experts": 8, "sliding_window": 8}),
}


def written(folder: Path, family: str, kind: str = "CausalLM") -> Path:
    name, settings = FAMILIES[family]
    return write(folder / family, name, kind, **SIZES | settings)


@cache
def reference(folder: Path, values: bool = False) -> tuple[list[dict[str, Tensor]], list[float], dict[str, Tensor]]:
    with wide_casts():
        return plain_update(folder, lambda p: torch.optim.SGD(p, lr=0.1), 0.5, 2, "eager", values)


# Ranks, of these to a layer, to a sequence, and to the experts of a layer.
DIVISIONS = [(2, 1, 1, 2), (4, 1, 1, 4), (4, 1, 1, 2), (2, 2, 1, 2), (4, 2, 1, 4), (4, 2, 1, 2), (4, 1, 2, 4)]


@pytest.mark.parametrize(
    ("family", "ranks", "layers", "sequences", "experts", "precision"),
    slow_but(
        [("qwen3_moe", 4, 2, 1, 2, "fp64")],  # an expert's weights are on two ranks
        [
            (family, *division, precision)
            for family in FAMILIES
            for division in DIVISIONS
            if family != "gpt_oss" or division[1] == 1
            for precision in ("fp32", "fp64")
        ],
    ),
)
def test_ranks_that_divide_experts_train_as_plain_torch_in_float64(
    family: str,
    ranks: int,
    layers: int,
    sequences: int,
    experts: int,
    precision: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    folder, pool = written(tmp_path, family), request.getfixturevalue(f"ranks{ranks}")
    for outcome in pool.run(divided_update, folder, layers, SGD, precision, sequences, True, experts):
        check_updates(outcome, reference(folder), 1e-5 if precision == "fp32" else 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layers", "experts"),
    [
        ("gpt_oss", 1, 4),
        *((family, *sizes) for family in ("qwen3_moe", "mixtral") for sizes in ((2, 4), (2, 2), (1, 4))),
    ],
)
def test_a_critic_and_an_average_of_divided_experts_are_those_of_plain_torch(
    family: str, layers: int, experts: int, tmp_path: Path, ranks4: RankPool
) -> None:
    critic = written(tmp_path / "critic", family, "SequenceClassification")
    for outcome in ranks4.run(divided_critic, critic, layers, SGD, experts):
        check_updates(outcome, reference(critic, values=True), 1e-10)
    check_averages(written(tmp_path, family), ranks4, (layers, experts), (1, 2), tmp_path, SGD)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layers"), [("qwen3_moe", 2), ("mixtral", 2), ("gpt_oss", 1)])
def test_divided_experts_are_replayed_and_balanced_as_whole_ones_are(
    family: str, layers: int, tmp_path: Path, ranks4: RankPool
) -> None:
    folder = write_family(family, tmp_path / family)
    moe = MoE(router_aux_loss_coef=COEF, routing_replay=True)
    expected = plain_moe_update(family, folder, COEF, replay=True)
    for outcome in ranks4.run(moe_update, family, folder, "fsdp", moe, True, layers, 4):
        assert distance(outcome.gradients[0], expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_ranks_whose_experts_get_no_token_make_the_same_passes(
    precision: str, tmp_path: Path, ranks4: RankPool
) -> None:
    folder = written(tmp_path, "gpt_oss")
    model = AutoModelForCausalLM.from_pretrained(folder)
    for layer in model.model.layers:
        layer.mlp.router.bias.data[:2] = 100.0  # all tokens go to the two experts of rank 0
    model.save_pretrained(folder)
    gradients, norms, weights = reference(folder)
    assert not gradients[0]["model.layers.0.mlp.experts.down_proj"][2:].any()
    for outcome in ranks4.run(divided_update, folder, 1, SGD, precision, 1, True, 4):
        for found, expected in zip(outcome.gradients, gradients, strict=True):
            assert distance(found, expected) < (1e-5 if precision == "fp32" else 1e-10)
        assert outcome.norms == pytest.approx(norms, rel=1e-5)
        assert distance(outcome.weights, weights) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "experts"), [(1, 4), (2, 2)])
def test_in_bf16_divided_experts_are_as_near_to_float64_as_whole_ones(
    layers: int, experts: int, tmp_path: Path, ranks4: RankPool
) -> None:
    folder, errors = written(tmp_path, "qwen3_moe"), []
    for division in ((1, 1), (layers, experts)):
        outcome, *_ = ranks4.run(divided_update, folder, division[0], SGD, "bf16", 1, False, division[1])
        errors.append(distance(outcome.gradients[0], reference(folder)[0][0]))
    assert errors[1] < 1.2 * errors[0] < 0.12, errors


Division = tuple[int, int, int, Stage]  # ranks, of these to a layer, to its experts, and the strategy
RESUMED: list[tuple[Division, Division]] = [
    ((2, 1, 2, "fsdp"), (2, 1, 2, "fsdp")),
    ((4, 2, 4, "fsdp"), (2, 1, 2, "fsdp")),
    ((4, 2, 2, "fsdp"), (4, 1, 4, "fsdp")),
    ((4, 1, 4, "fsdp"), (4, 2, 2, "fsdp")),
    ((2, 2, 2, "fsdp"), (1, 1, 1, "fsdp")),
    ((4, 1, 2, "fsdp"), (4, 1, 1, 3)),
    ((2, 1, 1, 1), (4, 2, 4, "fsdp")),
    ((4, 1, 1, "fsdp"), (4, 1, 4, "fsdp")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), RESUMED)
def test_a_checkpoint_resumes_at_another_division_of_experts(
    before: Division, after: Division, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = written(tmp_path, "qwen3_moe")
    ran = []
    for (ranks, layers, experts, stage), resume in ((before, False), (after, True)):
        pool = request.getfixturevalue(f"ranks{ranks}")
        ran.append(pool.run(train_and_save, model, layers, tmp_path, 0 if resume else 2, resume, stage, experts))
    expected, found = (put_together([parts for parts, _ in each]) for each in ran)
    for key, kinds in expected.items():
        assert {*kinds} == {"weight", "exp_avg", "exp_avg_sq"}
        for kind, of in kinds.items():
            assert torch.equal(found[key][kind], of), (key, kind)
    assert all(torch.equal(ran[1][0][1][key], of) for key, of in ran[0][0][1].items())


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_with_divided_experts_resumes_to_the_bit_and_is_exported_whole(
    family: str, tmp_path: Path, ranks4: RankPool
) -> None:
    folder, layers = written(tmp_path, family), 1 if family == "gpt_oss" else 2
    given = (folder, layers, tmp_path / "in two", 1)
    (_, expected), *_ = ranks4.run(train_and_save, folder, layers, tmp_path / "at once", 2, False, "fsdp", 2)
    ranks4.run(train_and_save, *given, False, "fsdp", 2)
    (_, found), *_ = ranks4.run(train_and_save, *given, True, "fsdp", 2)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "in two" / "model").state_dict()
    for key, of in expected.items():
        assert torch.equal(found[key], of), key
        assert torch.equal(saved[key], of), key


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layers"), [("qwen3_moe", 1), ("qwen3_moe", 2), ("gpt_oss", 1)])
def test_loading_reads_from_files_the_experts_of_a_rank_and_no_more(
    family: str, layers: int, tmp_path: Path, ranks4: RankPool
) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 512, "intermediate_size": 512}
    name, settings = FAMILIES[family]
    large = write(tmp_path / "large", name, **SIZES | settings | sizes)
    of_file = (large / "model.safetensors").stat().st_size
    for read, held in ranks4.run(loading, written(tmp_path, family), large, layers, 4):
        assert held < 0.26 * of_file  # norms and routers are held by all peers
        assert held < read < held + 0.01 * of_file  # config.json, and the header twice


@pytest.mark.parametrize(
    ("settings", "size", "layers", "found"),
    [
        ({}, 3, 1, "`placement.actor.expert_parallel_size` is 3, which does not divide the 8 experts"),
        ({}, 1, 2, "set `expert_parallel_size` to 2 or more"),
        ({"model_type": "olmoe"}, 2, 1, "of the type 'olmoe'; experts can be divided in gpt_oss, mixtral"),
        ({"model_type": "qwen3"}, 2, 1, "of the type 'qwen3'; experts can be divided in gpt_oss, mixtral"),
    ],
)
def test_experts_that_cannot_be_divided_are_refused_in_a_line(
    settings: dict[str, object], size: int, layers: int, found: str
) -> None:
    config = AutoConfig.for_model(**{"model_type": "qwen3_moe", "num_experts": 8, **settings})
    with pytest.raises(UserError, match=f"^`placement.actor.expert_parallel_size` is {size}, ") as refused:
        check_expert_parallel(config, size, layers, "actor")
    assert found in str(refused.value)
    check_expert_parallel(config, 1, 1, "actor")


def test_strategies_that_cannot_divide_experts_say_which_can() -> None:
    roles, layouts = {"actor": CausalLM("tiny")}, {"actor": Layout((0, 1), 2, expert_parallel_size=2)}
    with pytest.raises(UserError, match=r"expert_parallel_size` is 2, and DeepSpeedStrategy .* use `strategy: fsdp`"):
        DeepSpeedStrategy(1).check_roles(roles, layouts)
    with pytest.raises(UserError, match=r"`hsdp_shard_size` is 2, and `placement.actor.expert_parallel_size` is 2"):
        FSDPStrategy(hsdp_shard_size=2).check_roles(roles, layouts)
    FSDPStrategy().check_roles(roles, layouts)
