"""Sequences that ranks divide among them, at every ZeRO stage against plain torch in float64."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor

from rlflow.models.causal_lm import CausalLM
from rlflow.models.optimizer import Optimizer
from rlflow.strategies.single import SingleProcess
from rlflow.testing.derivative import wide_casts
from rlflow.values.layout import Layout
from tests.ranks import RankPool
from tests.slow import slow_but
from tests.strategies.reference import TEMPERATURE, distance, plain_update
from tests.strategies.strategy_update import Outcome, Stage, rows_of
from tests.strategies.subsets import (
    bf16_gradient,
    forked_update,
    forked_update_by_peers,
    held_bytes,
    scalar_updates,
    scalar_updates_by_two,
    side_by_side,
)

STAGES: tuple[Stage, ...] = (0, 1, 2, 3, "fsdp")
SGD = Optimizer(name="sgd", lr=0.1, gradient_clipping=0.5)
Reference = tuple[list[dict[str, Tensor]], list[float], dict[str, Tensor]]


@cache
def reference(folder: Path) -> Reference:
    return plain_update(folder, lambda p: torch.optim.SGD(p, lr=0.1), 0.5, 2)


def alone(**settings: bool) -> SingleProcess:
    strategy = SingleProcess("fp64", **settings)
    Fabric(accelerator="cpu", devices=1, strategy=strategy.processes).launch()
    return strategy


@cache
def reference_scores(folder: Path) -> Tensor:
    strategy, handle = alone(), CausalLM(str(folder), trainable=False, temperature=TEMPERATURE)
    strategy.setup_role("reference", handle, folder)
    return handle.logprobs(rows_of([0, 1, 2]))


def refuse_unlike(outcome: Outcome, folder: Path) -> None:
    gradients, norms, weights = reference(folder)
    for gradient, expected in zip(outcome.gradients, gradients, strict=True):
        assert distance(gradient, expected) < 1e-6
    assert outcome.norms == pytest.approx(norms, rel=1e-6)
    assert distance(outcome.weights, weights) < 1e-7


@pytest.mark.parametrize("stage", slow_but((2, "fsdp"), STAGES))
def test_with_two_ranks_to_a_sequence_a_role_trains_as_in_one_process(
    stage: Stage, tiny: Path, untied: Path, ranks2: RankPool
) -> None:
    # The critic's rows are dealt to the same two ranks, each with sequences of its own.
    layouts = {"actor": Layout((0, 1), 1), "critic": Layout((0, 1), 2), "reference": Layout((0, 1), 1)}
    found = ranks2.run(side_by_side, {"actor": tiny, "critic": untied}, layouts, stage, SGD)
    for seen, scores in found:
        refuse_unlike(seen["actor"], tiny)
        refuse_unlike(seen["critic"], untied)
        assert torch.equal(scores, found[0][1])
        torch.testing.assert_close(scores.double(), reference_scores(tiny), rtol=0, atol=2e-6)


@pytest.mark.parametrize("stage", slow_but((3,), STAGES))
def test_data_and_sequence_parallel_sizes_multiply_and_are_each_role_s_own(
    stage: Stage, tiny: Path, untied: Path, ranks4: RankPool
) -> None:
    # Four ranks to a sequence share two heads of keys and values, which are doubled.
    layouts = {"actor": Layout((0, 1, 2, 3), 2), "critic": Layout((0, 1, 2, 3), 1), "reference": Layout((1, 3), 1)}
    for seen, _ in ranks4.run(side_by_side, {"actor": tiny, "critic": untied}, layouts, stage, SGD, None, True):
        refuse_unlike(seen["actor"], tiny)
        refuse_unlike(seen["critic"], untied)


@pytest.mark.parametrize("stage", slow_but((3,), [2, 3, "fsdp"]))
def test_a_critic_and_a_reward_model_train_on_divided_sequences(stage: Stage, tiny: Path, ranks2: RankPool) -> None:
    gradients, values, ends = scalar_updates(alone(), tiny)
    for found in ranks2.run(scalar_updates_by_two, tiny, stage):
        assert distance(found[0], gradients) < 2e-6
        torch.testing.assert_close(found[1].double(), values, rtol=0, atol=1e-5)
        torch.testing.assert_close(found[2].double(), ends, rtol=0, atol=1e-5)


@pytest.mark.parametrize("stage", slow_but(("fsdp",), STAGES))
@pytest.mark.parametrize("peers", slow_but((2,), [2, 4]))
def test_rows_that_share_prefixes_are_divided_alike(
    peers: int, stage: Stage, tiny: Path, ranks2: RankPool, ranks4: RankPool
) -> None:
    with wide_casts():
        scores, gradient = forked_update(alone(share_prefixes=False), tiny)
    for found, of_peer in {2: ranks2, 4: ranks4}[peers].run(forked_update_by_peers, tiny, stage):
        torch.testing.assert_close(found.double(), scores, rtol=0, atol=1e-5)
        assert distance(of_peer, gradient) < 2e-6


@pytest.mark.parametrize("stage", slow_but((2,), [2, 3, "fsdp"]))
def test_in_bf16_the_gradient_is_right_up_to_bf16(stage: Stage, tiny: Path, ranks2: RankPool) -> None:
    for gradient in ranks2.run(bf16_gradient, tiny, stage, SGD):
        assert distance(gradient, reference(tiny)[0][0]) < 0.03  # bf16 resolves 2 ** -8 = 0.004


def test_a_rank_keeps_the_activations_of_its_part_only(tiny: Path, ranks2: RankPool) -> None:
    (whole, _), parts = ranks2.run(held_bytes, tiny, 2), ranks2.run(held_bytes, tiny, 1)
    assert max(parts) < 0.55 * whole
