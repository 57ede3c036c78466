"""Features of FSDP: copies of what ranks divide, the memory of a rank, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rlflow.errors import UserError
from rlflow.models.causal_lm import CausalLM
from rlflow.models.lora import LoRA
from rlflow.models.optimizer import Optimizer
from rlflow.strategies import DeepSpeedStrategy, FSDPStrategy, TrainingStrategy
from rlflow.values.layout import Layout
from tests.ranks import RankPool
from tests.strategies.reference import TEMPERATURE, distance, plain_update
from tests.strategies.state import pieces, put_together
from tests.strategies.strategy_update import Outcome, Stage, backward, launch, rows_of, trained, update

SGD = Optimizer(name="sgd", lr=0.1, gradient_clipping=0.5)


def adapted_in_bf16(folder: Path, stage: Stage) -> tuple[list[float], set[tuple[bool, torch.dtype]]]:
    """Norms of two updates of adapters; of the parameters whether they are trained, and their dtypes."""
    strategy = launch(stage, "bf16")
    torch.manual_seed(5)
    handle = CausalLM(str(folder), optimizer=SGD, temperature=TEMPERATURE, lora=LoRA(rank=4))
    strategy.setup_role("actor", handle, folder)
    norms = []
    for _ in range(2):
        backward(strategy, "actor", handle)
        norms.append(strategy.step("actor"))
    parameters = strategy.roles["actor"].model.parameters()
    return norms, {(parameter.requires_grad, parameter.dtype) for parameter in parameters}


def test_in_bf16_float32_adapters_train_with_frozen_weights_as_at_zero_3(tiny: Path, ranks2: RankPool) -> None:
    expected = ranks2.run(adapted_in_bf16, tiny, 3)
    for (norms, dtypes), (of_zero, _) in zip(ranks2.run(adapted_in_bf16, tiny, "fsdp"), expected, strict=True):
        assert norms == pytest.approx(of_zero, rel=1e-2)  # bf16 resolves 4e-3
        assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}


def in_copies(folder: Path, within: int) -> Outcome:
    """Two updates where each `within` ranks divide the weights; one of four has no rows."""
    return update(launch("fsdp", hsdp_shard_size=within), folder, SGD, updates=2)


@pytest.mark.parametrize("within", [1, 2])
def test_gradients_are_the_whole_batch_s_where_ranks_divide_and_copy_weights(
    within: int, tiny: Path, ranks4: RankPool
) -> None:
    gradients, norms, weights = plain_update(tiny, lambda p: torch.optim.SGD(p, lr=0.1), 0.5, updates=2)
    for outcome in ranks4.run(in_copies, tiny, within):
        for found, expected in zip(outcome.gradients, gradients, strict=True):
            assert distance(found, expected) < 1e-6
        assert outcome.norms == pytest.approx(norms, rel=1e-6)
        assert distance(outcome.weights, weights) < 1e-7


def copied_state(folder: Path) -> list[tuple[str, torch.Size, str, int, torch.Tensor]]:
    strategy = launch("fsdp", hsdp_shard_size=2)
    update(strategy, folder, Optimizer())
    return pieces(strategy)


def test_ranks_with_copies_write_each_element_of_the_state_once(tiny: Path, ranks4: RankPool) -> None:
    found = ranks4.run(copied_state, tiny)
    assert {kind for kinds in put_together(found).values() for kind in kinds} == {"weight", "exp_avg", "exp_avg_sq"}
    written = [sum(values.numel() for *_, values in parts) for parts in found]
    assert max(written) <= 1.1 * min(written)


def held(folder: Path) -> list[float]:
    """This rank's weights and gradients over those of the whole model: after scoring, and between micro-batches."""
    strategy, handle = launch("fsdp", "bf16"), trained(folder, SGD)
    strategy.setup_role("actor", handle, folder)
    handle.logprobs(rows_of([0, 1]))
    parameters = list(strategy.roles["actor"].model.parameters())
    shares = [_share(parameters)]
    with handle.training():
        loss = handle.logprobs(rows_of([2])).sum()
    strategy.backward("actor", loss, last=False)
    gradients = [parameter.grad for parameter in parameters]
    assert all(gradient is not None and gradient.dtype == torch.float32 for gradient in gradients)
    return [*shares, _share(parameters), _share(gradients)]


def _share(tensors: list[nn.Parameter]) -> float:
    assert all(isinstance(tensor, DTensor) for tensor in tensors)
    return sum(tensor.to_local().numel() for tensor in tensors) / sum(tensor.numel() for tensor in tensors)


def test_a_rank_holds_its_rows_alone_after_scoring_and_between_micro_batches(tiny: Path, ranks2: RankPool) -> None:
    for shares in ranks2.run(held, tiny):
        assert shares == pytest.approx([0.5, 0.5, 0.5], abs=0.01)


def test_ranks_that_are_not_a_multiple_of_those_that_divide_are_refused() -> None:
    roles = {"critic": CausalLM("tiny"), "actor": CausalLM("tiny")}
    layouts = {"critic": Layout((1,), 1), "actor": Layout((0, 1, 2), 3), "rollout": Layout((3, 4, 5), 3)}
    with pytest.raises(UserError, match=r"`hsdp_shard_size` is 2, and `actor` lives on 3 ranks"):
        FSDPStrategy(hsdp_shard_size=2).check_roles(roles, layouts)
    with pytest.raises(UserError, match=r"`hsdp_shard_size` is 4, and roles are on 3 ranks; give 3 or less"):
        FSDPStrategy(hsdp_shard_size=4).check_roles(roles, layouts)
    FSDPStrategy(hsdp_shard_size=3).check_roles(roles, layouts)


@pytest.mark.parametrize("strategy", [FSDPStrategy(), DeepSpeedStrategy(1)])
@pytest.mark.parametrize("name", ["torch.optim.Adafactor", "torch.optim.Muon"])
def test_an_optimizer_of_whole_matrices_is_refused_where_ranks_divide_them(
    name: str, strategy: TrainingStrategy
) -> None:
    roles = {"actor": CausalLM("tiny", optimizer=Optimizer(name, lr=1e-6))}
    with pytest.raises(UserError, match=f"`optimizer.name` is '{name}', whose step for a matrix differs"):
        strategy.check_roles(roles, {"actor": Layout((0, 1), 2)})
    DeepSpeedStrategy(0).check_roles(roles, {"actor": Layout((0, 1), 2)})


def test_an_optimizer_that_deepspeed_replaces_is_refused() -> None:
    roles = {"actor": CausalLM("tiny", optimizer=Optimizer("torch.optim.Adagrad"))}
    with pytest.raises(
        UserError, match=r"`optimizer\.name` is 'torch\.optim\.Adagrad', which DeepSpeed replaces by one"
    ):
        DeepSpeedStrategy(2).check_roles(roles, {"actor": Layout((0, 1), 2)})
    DeepSpeedStrategy(0).check_roles(roles, {"actor": Layout((0, 1), 2)})


@pytest.mark.parametrize("name", ["adamw", "sgd", "torch.optim.Adam", "torch.optim.RMSprop"])
def test_an_optimizer_that_steps_each_number_alone_is_taken(name: str) -> None:
    FSDPStrategy().check_roles({"actor": CausalLM("tiny", optimizer=Optimizer(name))}, {"actor": Layout((0, 1), 2)})


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"hsdp_shard_size": 0}, "`hsdp_shard_size` is 0"),
        ({"precision": "fp64"}, "`precision` is 'fp64'"),
        ({"token_budget": 0}, "`token_budget` is 0"),
        ({"timeout_s": 0.0}, "`timeout_s` is 0.0"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(settings: dict[str, object], found: str) -> None:
    with pytest.raises(UserError, match=found):
        FSDPStrategy(**settings)  # type: ignore[arg-type]


WITHOUT_DEEPSPEED = """
import sys
from pathlib import Path
sys.modules["deepspeed"] = None  # an import of it fails
from rlflow.models.optimizer import Optimizer
from tests.strategies.strategy_update import launch, update
import torch.distributed as dist
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
print("norm", update(launch("fsdp"), Path(sys.argv[1]), Optimizer()).norms[0] > 0)
"""


def norm_without_deepspeed(tiny: Path) -> float:
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "deepspeed", None)  # an import of it fails
        return float(update(launch("fsdp"), tiny, Optimizer()).norms[0])


def test_an_update_imports_no_deepspeed(tiny: Path, ranks1: RankPool) -> None:
    assert ranks1.run(norm_without_deepspeed, tiny)[0] > 0


@pytest.mark.slow
def test_fsdp_trains_where_deepspeed_is_not_installed(tiny: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_DEEPSPEED, str(tiny)], capture_output=True, text=True, check=False
    )
    assert "norm True" in run.stdout, run.stderr[-2000:]
