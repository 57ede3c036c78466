"""Training in float16: gradients by a scaled loss, and updates that overflow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from rlflow import checkpoint
from rlflow.errors import UserError
from rlflow.models.optimizer import Optimizer
from rlflow.strategies import DeepSpeedStrategy, SingleProcess
from rlflow.strategies.distributed import DistributedStrategy
from rlflow.strategies.role import FIRST, LONG, LossScale
from tests.checkpoint_files import write_checkpoint
from tests.ranks import RankPool
from tests.strategies.reference import distance, plain_update
from tests.strategies.strategy_update import Stage, all_weights, backward, launch, trained

SMALL = 1e-6  # a loss whose gradients float16 takes for 0, or has 2 bits of
STAGES: list[Stage] = [1, 3, "fsdp"]
ADAMW = Optimizer("adamw", lr=1e-2, gradient_clipping=1.0)


@dataclass
class Seen:
    """By one rank."""

    gradients: dict[str, Tensor]
    norm: float
    weights: dict[str, Tensor]
    overflowed: float  # norm of the update that did
    kept: bool  # the weights, by that update
    factors: list[float]  # of the loss, after each update
    done: int


def launch_anywhere(stage: Stage, precision: str = "fp16") -> DistributedStrategy:
    """DeepSpeed asks the CPU for instructions that few have, and computes as rightly without."""
    get_accelerator().is_fp16_supported = lambda: True
    return launch(stage, precision)


def overflow_and_update(folder: Path, stage: Stage) -> Seen:
    """An update that overflows on rank 1 alone, then one of a small loss."""
    strategy = launch_anywhere(stage)
    handle = trained(folder, Optimizer(name="sgd", lr=0.1, gradient_clipping=0.5 * SMALL))
    strategy.setup_role("actor", handle, folder)
    scale = strategy.roles["actor"].loss_scale
    assert scale is not None
    before = all_weights(strategy, "actor")
    backward(strategy, "actor", handle, factor=1e6 if dist.get_rank() == 1 else 1.0)
    overflowed, factors = strategy.step("actor"), [scale.factor]
    after = all_weights(strategy, "actor")
    backward(strategy, "actor", handle, factor=SMALL)
    gradients = {key: value.clone() / SMALL for key, value in strategy.gradients("actor").items()}
    norm = strategy.step("actor")
    factors.append(scale.factor)
    kept = all(torch.equal(weight, before[key]) for key, weight in after.items())
    weights = all_weights(strategy, "actor")
    return Seen(gradients, norm / SMALL, weights, overflowed, kept, factors, strategy.roles["actor"].done)


@pytest.mark.parametrize("stage", STAGES)
def test_small_gradients_match_the_reference_and_all_skip_one_rank_s_overflow(
    stage: Stage, tiny: Path, ranks2: RankPool
) -> None:
    of_float64 = plain_update(tiny, lambda p: torch.optim.SGD(p, lr=0.1), 0.5, updates=1)
    (gradients,), (norm,), weights = of_float64
    for seen in ranks2.run(overflow_and_update, tiny, stage):
        assert (math.isfinite(seen.overflowed), seen.kept) == (False, True)
        assert seen.factors == [FIRST / 2, FIRST / 2]
        assert distance(seen.gradients, gradients) < 1e-2  # float16 resolves 1e-3
        assert seen.norm == pytest.approx(norm, rel=1e-2)
        assert seen.done == 1
        assert seen.weights.keys() == weights.keys()
        assert next(iter(seen.weights.values())).dtype == torch.float16


def goes_on(folder: Path, stage: Stage, saved: Path, then: Stage) -> list[tuple[float, int] | None]:
    """The loss scale after an overflow and an update, and of a strategy that resumes from there."""
    strategy = launch_anywhere(stage)
    handle = trained(folder, ADAMW)
    strategy.setup_role("actor", handle, folder)
    for factor in (1e6, 1.0):
        backward(strategy, "actor", handle, factor=factor)
        strategy.step("actor")
    write_checkpoint(strategy, saved, 1)
    found = []
    for precision in ("fp16", "bf16"):
        other = launch_anywhere(then, precision)
        other.setup_role("actor", trained(folder, ADAMW), folder)
        checkpoint.restore(checkpoint.find("last", saved), other, ["actor"])
        scale = other.roles["actor"].loss_scale
        found.append(None if scale is None else scale.record())
    return found


def test_a_checkpoint_keeps_the_loss_scale_for_another_strategy(tiny: Path, tmp_path: Path, ranks2: RankPool) -> None:
    for found in ranks2.run(goes_on, tiny, 2, tmp_path, "fsdp"):
        assert found == [(FIRST / 2, 1), None]


def test_a_loss_scale_falls_immediately_and_rises_after_long() -> None:
    scale = LossScale(factor=4.0)
    for _ in range(LONG - 1):
        scale.update(finite=True)
    assert scale == LossScale(4.0, LONG - 1)
    scale.update(finite=True)
    assert scale == LossScale(8.0, 0)
    for factor, can_fall in ((4.0, True), (2.0, True), (1.0, False), (1.0, False)):
        scale.update(finite=False)
        assert (scale.factor, scale.can_fall) == (factor, can_fall)


def test_float16_is_refused_where_gradients_or_states_would_be_in_it() -> None:
    with pytest.raises(UserError, match=r"`precision` is 'fp16', and `stage` is 0.*use stage 1"):
        DeepSpeedStrategy(0, "fp16")
    with pytest.raises(UserError, match=r"`precision` is 'fp16'.*use `strategy: fsdp`"):
        SingleProcess("fp16")  # type: ignore[arg-type]
