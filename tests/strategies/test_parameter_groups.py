"""Groups of weights with options of their own, from `configure_optimizers`, against plain torch in float64."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rlflow.algorithms import SFT
from rlflow.callbacks import LearningRateMonitor
from rlflow.errors import UserError
from rlflow.models.causal_lm import CausalLM
from rlflow.models.optimizer import Optimizer
from rlflow.module import RLModule
from rlflow.run.optimizers import configure_optimizers
from rlflow.run.prepare import configure
from rlflow.trainer import Trainer
from tests.ranks import RankPool
from tests.slow import slow_but
from tests.strategies.grouped import (
    CLIP,
    Grouped,
    adamw,
    before_updates,
    grouped_role,
    grouped_updates,
    on_ranks,
    rates,
    resumed,
)
from tests.strategies.reference import distance, plain_update
from tests.strategies.state import put_together
from tests.strategies.strategy_update import Stage
from tests.strategies.test_single import single


@cache
def expected(folder: Path, updates: int, scheduled: bool) -> dict[str, Tensor]:
    """The weights after so many updates by torch's own optimizer and scheduler, in float64."""
    from transformers import AutoModelForCausalLM

    names = [name for name, _ in AutoModelForCausalLM.from_pretrained(folder).named_parameters()]

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = adamw(dict(zip(names, parameters, strict=True)))
        if scheduled:
            scheduler = rates(optimizer)
            optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return optimizer

    return plain_update(folder, make, CLIP, updates)[2]


@pytest.mark.parametrize("scheduled", [False, True])
def test_groups_of_one_process_are_those_of_torch_in_float64(scheduled: bool, tiny: Path) -> None:
    outcome = grouped_updates(single("fp64"), tiny, 3, scheduled=scheduled)
    assert distance(outcome.weights, expected(tiny, 3, scheduled)) < 1e-12


@pytest.mark.parametrize(
    ("stage", "precision"),
    slow_but([(2, "fp32")], itertools.product([0, 1, 2, 3, "fsdp"], ["fp32", "bf16"])),
)
def test_on_two_ranks_groups_and_their_schedules_are_those_of_torch(
    stage: Stage, precision: str, untied: Path, ranks2: RankPool
) -> None:
    weights, limit = expected(untied, 3, True), 1e-4 if precision == "fp32" else 0.02
    for outcome in ranks2.run(on_ranks, untied, stage, precision, 3, True):
        assert distance(outcome.weights, weights) < limit


@pytest.mark.parametrize("stage", slow_but([0], [0, 2, 3, "fsdp"]))
def test_no_weight_decays_before_the_first_update(stage: Stage, untied: Path, ranks2: RankPool) -> None:
    found = put_together(ranks2.run(before_updates, untied, stage, "bf16"))
    for name, weight in load_file(untied / "model.safetensors").items():
        torch.testing.assert_close(found[name]["weight"], weight, rtol=2**-8, atol=0)  # rounded to bf16 as it is read


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3, "fsdp"])
def test_on_three_ranks_groups_are_those_of_torch(stage: Stage, tiny: Path, ranks3: RankPool) -> None:
    for outcome in ranks3.run(on_ranks, tiny, stage, "fp32", 3, False):
        assert distance(outcome.weights, expected(tiny, 3, False)) < 1e-4


@pytest.mark.parametrize(
    ("stage", "precision"), slow_but([(2, "bf16")], itertools.product([0, 1, 2, 3, "fsdp"], ["fp32", "bf16"]))
)
def test_a_resumed_run_has_each_group_s_rate_and_state_to_the_bit(
    stage: Stage, precision: str, untied: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    for straight, continued in ranks2.run(resumed, untied, stage, precision, tmp_path):
        assert len(straight) == len(continued) > 0
        for (*place, values), (*other, found) in zip(straight, continued, strict=True):
            assert place == other
            assert torch.equal(values, found), place


def test_the_schedule_of_the_settings_holds_for_each_group_s_own_rate(tiny: Path) -> None:
    strategy = single("fp32")
    grouped_role(strategy, tiny, warmup_steps=2, schedule="linear")
    role, found = strategy.roles["actor"], []
    for role.done in range(4):
        role.set_learning_rates()
        found.append(role.learning_rates)
    # warm-up 1/2, 1, then from 1 to 0 over the two updates that are left
    highest = {"/pg1": 0.01, "/pg2": 0.002}
    assert found == [{name: pytest.approx(lr * part) for name, lr in highest.items()} for part in (0.5, 1, 1, 0.5)]


def test_the_logged_momentum_is_that_of_the_update_though_a_scheduler_changes_it(tiny: Path) -> None:
    strategy, metrics = single("fp32"), dict[str, float]()
    module, monitor = Grouped(grouped_role(strategy, tiny)), LearningRateMonitor(log_momentum=True)
    monitor.on_fit_start(Trainer(), module)
    strategy.roles["actor"].optimizer.param_groups[0]["betas"] = (0.7, 0.9)  # type: ignore[union-attr]  # as OneCycleLR
    monitor.on_step_end(Trainer(), module, 1, metrics)
    assert metrics == {"actor/momentum/pg1": 0.7, "actor/momentum/pg2": 0.5}


@pytest.mark.parametrize(("name", "decay"), [("adamw", 0.0), ("torch.optim.Adam", 0.0), ("torch.optim.AdamW", 0.01)])
def test_the_logged_momentum_and_decay_are_the_defaults_of_the_class(name: str, decay: float) -> None:
    metrics, module = dict[str, float](), SFT(CausalLM("tiny", optimizer=Optimizer(name)))
    monitor = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    monitor.on_fit_start(Trainer(), module)
    monitor.on_step_end(Trainer(), module, 1, metrics)
    assert metrics == {"actor/momentum": 0.9, "actor/weight_decay": decay}


def refused(returns: Callable[[Any], Any], folder: Path, **settings: Any) -> str:
    class Returns(Grouped):
        def configure_optimizers(self) -> Any:
            return returns(self.actor)

    module = Returns(CausalLM(str(folder), **settings))
    configure(module)
    with pytest.raises(UserError) as error:
        configure_optimizers(module, {"actor": folder}, torch.float32)
    return str(error.value)


def scheduled_by(interval: str) -> Callable[[Any], Any]:
    def returns(actor: Any) -> Any:
        optimizer = torch.optim.SGD(actor.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rates_of_one(optimizer), "interval": interval}}

    return returns


def with_schedulers(*of_each: int) -> Callable[[Any], Any]:
    """An optimizer, with a scheduler for each number: of it (0), or of one that is not returned (1)."""

    def returns(actor: Any) -> Any:
        pair = [torch.optim.SGD(actor.parameters(), lr=0.1) for _ in range(2)]
        schedulers = [{"scheduler": rates_of_one(pair[number]), "interval": "step"} for number in of_each]
        return pair[:1], schedulers

    return returns


def rates_of_one(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.5**done)


@pytest.mark.parametrize(
    ("returns", "settings", "said"),
    [
        (lambda actor: 7, {}, "`configure_optimizers` returned 7; return a torch optimizer"),
        (lambda actor: torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1), {}, "SGD .* not over the parameters"),
        (lambda actor: torch.optim.SGD([*actor.parameters()][1:], lr=0.1), {}, "leaves out 1 weights of `actor`, 'mod"),
        (
            lambda actor: [torch.optim.SGD(actor.parameters(), lr=0.1)] * 2,
            {},
            "another has the same; make one for each",
        ),
        (
            lambda actor: torch.optim.SGD(
                [{"params": [*actor.parameters()][:1]}, {"params": [*actor.parameters()][1:], "momentum": 0.9}], lr=0.1
            ),
            {},
            "`momentum` is 0 in group 0 .* and 0.9 in group 1",
        ),
        (with_schedulers(1), {}, "a LambdaLR of `configure_optimizers` is for an optimizer that it does not return"),
        (with_schedulers(0, 0), {}, "or that has another scheduler too; .* such as a ChainedScheduler"),
        (lambda actor: {"of": torch.optim.SGD(actor.parameters(), lr=0.1)}, {}, r"returned {'of': SGD \( Parameter"),
        (scheduled_by("epoch"), {}, "a LambdaLR by 1 epoch; a rate changes with each update"),
        (
            scheduled_by("step"),
            {"optimizer": Optimizer(warmup_steps=3)},
            "`warmup_steps` or `schedule` of `actor.optimizer` is given",
        ),
        (
            lambda actor: torch.optim.SGD(actor.parameters(), lr=0.1),
            {"optimizer": Optimizer(lr=0.5)},
            "`actor.optimizer` is given, and `configure_optimizers` makes",
        ),
    ],
)
def test_what_cannot_train_the_model_is_refused_in_one_line(
    returns: Callable[[Any], Any], settings: dict[str, Any], said: str, tiny: Path
) -> None:
    message = refused(returns, tiny, **settings)
    assert re.search(said, message), message
    assert "\n" not in message


class Everything(RLModule):
    """Two models, whose parameters it asks for as Lightning's modules do."""

    def __init__(self, folder: Path) -> None:
        self.actor, self.other = CausalLM(str(folder)), CausalLM(str(folder))
        self.reference = CausalLM(str(folder), trainable=False)

    def configure_optimizers(self) -> Any:
        self.names = [name for name, _ in self.named_parameters()]
        assert len([*self.parameters()]) == len(self.names)
        return torch.optim.SGD(
            [weight for name, weight in self.named_parameters() if name.startswith("actor.")], lr=1.0
        )


def test_a_module_has_the_parameters_of_all_models_that_are_trained(tiny: Path) -> None:
    module = Everything(tiny)
    configure(module)
    configure_optimizers(module, {"actor": tiny, "other": tiny}, torch.float32)
    of_one = [name for name in module.names if name.startswith("actor.")]
    assert module.names == [*of_one, *(name.replace("actor.", "other.", 1) for name in of_one)]
    assert "actor.model.norm.weight" in of_one
    assert (module.actor.optimizer.lr, module.other.optimizer.lr) == (1.0, Optimizer().lr)  # type: ignore[union-attr]
    with pytest.raises(UserError, match="are read outside of `configure_optimizers`"):
        next(module.parameters())


def test_parameters_are_there_within_the_hook_alone(tiny: Path) -> None:
    with pytest.raises(UserError, match="are read outside of `configure_optimizers`"):
        next(CausalLM(str(tiny)).parameters())
