"""Gradients and weights at every ZeRO stage and by FSDP against plain torch in float64, on real gloo processes."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlflow.models.optimizer import Optimizer
from tests.ranks import RankPool
from tests.slow import slow_but
from tests.strategies.reference import distance, plain_update
from tests.strategies.strategy_update import (
    Outcome,
    Stage,
    agreed,
    bucket_bytes,
    frozen_scores,
    one_update,
    save_after_update,
    scheduled_update,
    spoiled_update,
    two_roles,
    update_spoiled_in_one_part,
    updates_with_scores,
)

STAGES: tuple[Stage, ...] = (0, 1, 2, 3, "fsdp")
FEW: tuple[Stage, ...] = (2, "fsdp")
CLIP = 0.5  # the reference's gradients are longer
SGD = Optimizer(name="sgd", lr=0.1, gradient_clipping=CLIP)


def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


Reference = tuple[list[dict[str, Tensor]], list[float], dict[str, Tensor]]


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Reference:
    return plain_update(tiny, sgd, CLIP, updates=1)


@pytest.fixture(scope="module")
def outcomes(tiny: Path, ranks1: RankPool, ranks2: RankPool):  # type: ignore[no-untyped-def]
    """The reference's update by stage and number of ranks, each run once: what every rank saw."""

    @cache
    def run(stage: Stage, world_size: int) -> list[Outcome]:
        return {1: ranks1, 2: ranks2}[world_size].run(one_update, tiny, stage, "fp32", SGD)

    return run


@pytest.mark.parametrize("world_size", slow_but([2], [1, 2]))
@pytest.mark.parametrize("stage", STAGES)
class TestOneUpdate:
    def test_the_gradient_is_that_of_the_whole_batch(self, stage, world_size, outcomes, reference) -> None:
        for outcome in outcomes(stage, world_size):
            assert distance(outcome.gradients[0], reference[0][0]) < 1e-5

    def test_the_norm_is_that_before_clipping(self, stage, world_size, outcomes, reference) -> None:
        assert reference[1][0] > CLIP
        for outcome in outcomes(stage, world_size):
            assert outcome.norms == [pytest.approx(reference[1][0], rel=1e-5)]

    def test_the_weights_after_a_clipped_sgd_step_are_the_reference_s(
        self, stage, world_size, outcomes, reference, tiny
    ) -> None:
        before = dict(AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float64).named_parameters())
        moved = {key: after - before[key].detach() for key, after in reference[2].items()}
        for outcome in outcomes(stage, world_size):
            # float32 weights of size 1 resolve 6e-8, the whole step is 0.1 * CLIP long
            found = {key: after.double() - before[key].detach() for key, after in outcome.weights.items()}
            assert distance(found, moved) < 1e-4
            assert distance(outcome.weights, reference[2]) < 1e-6


@pytest.mark.parametrize("stage", slow_but(FEW, STAGES))
def test_adamw_with_a_warm_up_and_a_linear_schedule_follows_torch(stage: Stage, tiny: Path, ranks2: RankPool) -> None:
    # lr 0.01: half of it in the first of two warm-up updates, all in the second and third, 2/3 in the fourth of five
    settings = Optimizer(lr=0.01, eps=1e-3, weight_decay=0.1, warmup_steps=2, schedule="linear", gradient_clipping=CLIP)
    rates = iter([0.005, 0.01, 0.01, 0.01 * 2 / 3])

    def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters, eps=1e-3, weight_decay=0.1)
        optimizer.register_step_pre_hook(lambda *_: optimizer.param_groups[0].update(lr=next(rates)))
        return optimizer

    _, norms, weights = plain_update(tiny, adamw, CLIP, updates=4)
    for outcome in ranks2.run(scheduled_update, tiny, stage, settings):
        assert outcome.norms == pytest.approx(norms, rel=1e-4)
        assert distance(outcome.weights, weights) < 1e-6


@pytest.mark.parametrize(
    ("stage", "precision"),
    slow_but(
        [(2, "bf16"), ("fsdp", "bf16")],
        [*((stage, "fp32") for stage in STAGES), (2, "bf16"), (3, "bf16"), ("fsdp", "bf16")],
    ),
)
def test_an_update_that_one_rank_spoils_is_skipped_by_all_and_leaves_no_trace(
    stage: Stage, precision: str, tiny: Path, ranks2: RankPool
) -> None:
    expected = ranks2.run(one_update, tiny, stage, precision, SGD)
    for rank, (kept, norm, second) in enumerate(ranks2.run(spoiled_update, tiny, stage, precision, SGD)):
        assert kept
        assert not math.isfinite(norm)
        assert second.norms == expected[rank].norms
        assert all(torch.equal(second.weights[key], weight) for key, weight in expected[rank].weights.items())


def test_all_ranks_skip_an_update_with_a_nan_in_one_rank_s_part_of_the_gradient(tiny: Path, ranks2: RankPool) -> None:
    for kept, norm in ranks2.run(update_spoiled_in_one_part, tiny, SGD):
        assert kept
        assert not math.isfinite(norm)


@pytest.mark.parametrize("stage", slow_but(FEW, [2, 3, "fsdp"]))
def test_gradient_checkpointing_changes_no_gradient(
    stage: Stage, tiny: Path, ranks2: RankPool, reference: Reference
) -> None:
    for outcome in ranks2.run(one_update, tiny, stage, "fp32", SGD, True):
        assert distance(outcome.gradients[0], reference[0][0]) < 1e-5


@pytest.mark.parametrize("stage", slow_but((3,), [2, 3, "fsdp"]))
def test_a_bf16_gradient_is_the_reference_s_up_to_bf16(
    stage: Stage, tiny: Path, ranks2: RankPool, reference: Reference
) -> None:
    for outcome in ranks2.run(one_update, tiny, stage, "bf16", SGD):
        assert distance(outcome.gradients[0], reference[0][0]) < 0.03  # bf16 resolves 2 ** -8 = 0.004
        assert {weight.dtype for weight in outcome.weights.values()} == {torch.bfloat16}


@pytest.mark.parametrize("stage", slow_but((2, 3, "fsdp"), STAGES))
def test_weights_come_full_under_their_names_in_buckets_of_the_size_asked_for(
    stage: Stage, untied: Path, ranks2: RankPool
) -> None:
    expected = dict(AutoModelForCausalLM.from_pretrained(untied).named_parameters())
    for sizes, weights in ranks2.run(bucket_bytes, untied, stage, 70_000):
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[key], weight) for key, weight in expected.items())
        assert all(sum(bucket) <= 70_000 or len(bucket) == 1 for bucket in sizes)
        assert any(len(bucket) > 1 for bucket in sizes)


@pytest.mark.parametrize("stage", [2, 3, "fsdp"])
def test_a_frozen_role_scores_without_an_optimizer_while_ranks_have_unequal_rows(
    stage: Stage, tiny: Path, ranks2: RankPool
) -> None:
    (all_rows, trains), (first_row, _) = ranks2.run(frozen_scores, tiny, stage)
    assert not trains
    torch.testing.assert_close(first_row[0], all_rows[0, :9], rtol=0, atol=1e-5)  # row 0 has 9 response tokens


@pytest.mark.parametrize("stage", slow_but((3, "fsdp"), [0, 2, 3, "fsdp"]))
def test_two_roles_in_one_process_train_as_each_would_alone(
    stage: Stage, tiny: Path, untied: Path, ranks2: RankPool
) -> None:
    for weights in ranks2.run(two_roles, [tiny, untied], stage, SGD):
        for folder, found in zip([tiny, untied], weights, strict=True):
            assert distance(found, plain_update(folder, sgd, CLIP, updates=1)[2]) < 1e-6


@pytest.mark.parametrize(
    ("stage", "precision"),
    slow_but([(3, "fp32"), ("fsdp", "bf16")], [(2, "fp32"), (3, "fp32"), ("fsdp", "fp32"), ("fsdp", "bf16")]),
)
def test_a_saved_model_is_the_one_that_was_trained(
    stage: Stage, precision: str, tiny: Path, ranks2: RankPool, tmp_path: Path
) -> None:
    weights, _ = ranks2.run(save_after_update, tiny, stage, SGD, tmp_path / "saved", precision)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert str(model.dtype) == {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[precision]
    saved = dict(model.named_parameters())
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[key], weight) for key, weight in weights.items())


def test_rows_scored_after_updates_leave_no_weight_half_gathered(tiny: Path, ranks2: RankPool) -> None:
    # DeepSpeed gathers weights in advance, in the order of the updates, for a backward pass that does not come.
    scored, plain = (ranks2.run(updates_with_scores, tiny, SGD, scores) for scores in (True, False))
    for found, expected in zip(scored[0], plain[0], strict=True):
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_ranks_agree_on_the_largest_count(ranks2: RankPool) -> None:
    assert ranks2.run(agreed, 2) == [5, 5]  # of 5 and 3


def test_an_optimizer_by_class_path_follows_torch(tiny: Path, ranks2: RankPool) -> None:
    # Weight decay sets Adam apart from AdamW, and its betas from the defaults.
    own = {"betas": (0.7, 0.9), "weight_decay": 0.1}
    _, _, weights = plain_update(tiny, lambda p: torch.optim.Adam(p, lr=1e-3, **own), CLIP, updates=1)
    given = Optimizer("torch.optim.Adam", lr=1e-3, gradient_clipping=CLIP, arguments=own)
    for outcome in ranks2.run(one_update, tiny, 2, "fp32", given):
        assert distance(outcome.weights, weights) < 1e-5
