"""The plain strategy, float64 included."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric

from rlflow.errors import UserError
from rlflow.models.causal_lm import CausalLM
from rlflow.models.optimizer import Optimizer
from rlflow.strategies.role import scheduled
from rlflow.strategies.single import SingleProcess
from rlflow.strategies.strategy import WEIGHT
from tests.strategies.reference import distance, plain_update
from tests.strategies.state import InMemory
from tests.strategies.strategy_update import backward, trained, update

CLIP = 0.5


class Counts(torch.optim.Optimizer):
    """Moves each number by lr / n at update n; it counts in a plain number, of each weight or of its group."""

    def __init__(self, params: Iterable[torch.nn.Parameter], lr: float, of_group: bool = False) -> None:
        super().__init__(params, {"lr": lr, "of_group": of_group})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                counted = group if group["of_group"] else self.state[weight]
                counted["step"] = counted.get("step", 0) + 1
                weight -= group["lr"] / counted["step"]


def single(precision: str) -> SingleProcess:
    strategy = SingleProcess(precision=precision)
    Fabric(accelerator="cpu", devices=1, strategy=strategy.processes).launch()
    return strategy


def test_in_float64_an_update_is_the_reference_s_to_rounding(tiny: Path) -> None:
    gradients, norms, weights = plain_update(tiny, lambda p: torch.optim.SGD(p, lr=0.1), CLIP, updates=2)
    outcome = update(single("fp64"), tiny, Optimizer(name="sgd", lr=0.1, gradient_clipping=CLIP), updates=2)
    assert distance(outcome.gradients[1], gradients[1]) < 1e-10
    assert outcome.norms == pytest.approx(norms, rel=1e-10)
    assert distance(outcome.weights, weights) < 1e-12


def test_without_a_limit_gradients_are_not_clipped(tiny: Path) -> None:
    _, _, weights = plain_update(tiny, lambda p: torch.optim.SGD(p, lr=0.1), float("inf"), updates=1)
    outcome = update(single("fp64"), tiny, Optimizer(name="sgd", lr=0.1, gradient_clipping=0.0))
    assert distance(outcome.weights, weights) < 1e-12


def test_an_update_that_is_not_finite_counts_for_nothing(tiny: Path) -> None:
    strategy = single("fp32")
    handle = trained(tiny, Optimizer(lr=1.0, warmup_steps=10))
    strategy.setup_role("actor", handle, tiny)
    backward(strategy, "actor", handle, factor=float("inf"))
    strategy.step("actor")
    strategy.roles["actor"].set_learning_rates()
    assert strategy.roles["actor"].learning_rates == {"": pytest.approx(0.1)}  # still the first of the warm-up


def test_more_devices_than_one_are_refused() -> None:
    with pytest.raises(UserError, match=r"`trainer\.devices` is 2"):
        Fabric(accelerator="cpu", devices=2, strategy=SingleProcess().processes)


def test_a_schedule_that_ends_needs_to_know_when(tiny: Path) -> None:
    with pytest.raises(UserError, match=r"trainer\.max_steps"):
        single("fp32").setup_role("actor", CausalLM(str(tiny), optimizer=Optimizer(schedule="cosine")), tiny)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        # (1 + cos(pi x)) / 2 at x = 0, 1/4, 1/2, 3/4
        ("cosine", [0.5, 1.0, 1.0, 0.8535534, 0.5, 0.1464466]),
    ],
)
def test_the_learning_rate_rises_over_the_warm_up_and_falls_to_nothing_at_the_end(
    schedule: str, rates: list[float]
) -> None:
    settings = Optimizer(lr=1.0, warmup_steps=2, schedule=schedule)  # type: ignore[arg-type]
    assert [scheduled(settings, done, 6) for done in range(6)] == pytest.approx(rates)


def test_an_optimizer_by_class_path_with_arguments_of_its_own_is_torch_s_in_float64(tiny: Path) -> None:
    own = {"betas": (0.7, 0.9), "weight_decay": 0.1}
    _, _, weights = plain_update(tiny, lambda p: torch.optim.Adam(p, lr=1e-2, **own), CLIP, updates=3)
    given = Optimizer("torch.optim.Adam", lr=1e-2, gradient_clipping=CLIP, arguments=own)
    assert distance(update(single("fp64"), tiny, given, updates=3).weights, weights) < 1e-9


def test_sgd_takes_a_momentum(tiny: Path) -> None:
    _, _, weights = plain_update(tiny, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), CLIP, updates=2)
    given = Optimizer("sgd", lr=0.1, gradient_clipping=CLIP, arguments={"momentum": 0.9})
    assert distance(update(single("fp64"), tiny, given, updates=2).weights, weights) < 1e-12


def test_an_optimizer_that_counts_in_plain_numbers_resumes_its_count(tiny: Path) -> None:
    strategies = single("fp64"), single("fp64")
    first, second = strategies
    handles = [trained(tiny, Optimizer(f"{__name__}.Counts", lr=1.0)) for _ in strategies]
    for strategy, handle in zip(strategies, handles, strict=True):
        strategy.setup_role("actor", handle, tiny)
    for _ in range(2):
        backward(first, "actor", handles[0])
        first.step("actor")
    state = {
        key: {WEIGHT: part[WEIGHT].values.detach().clone().view(shape)}
        for key, shape, part in first.state_parts("actor")
    }
    second.load_state_parts("actor", InMemory(state), 2)  # type: ignore[arg-type]
    backward(second, "actor", handles[1])
    second.step("actor")
    for key, _, part in second.state_parts("actor"):  # the third update: by 1 / 3
        torch.testing.assert_close(part[WEIGHT].values.detach(), state[key][WEIGHT].flatten() - 1 / 3)


def test_before_the_first_update_there_is_no_momentum_whatever_is_stored(tiny: Path) -> None:
    strategies = single("fp64"), single("fp64")
    momentum = Optimizer("sgd", lr=0.1, weight_decay=0.1, arguments={"momentum": 0.9})
    handles = [trained(tiny, momentum) for _ in strategies]
    for strategy, handle in zip(strategies, handles, strict=True):
        strategy.setup_role("actor", handle, tiny)
    first, second = strategies
    state = {
        key: {WEIGHT: part[WEIGHT].values.detach().clone().view(shape), "momentum_buffer": torch.ones(shape)}
        for key, shape, part in first.state_parts("actor")
    }
    second.load_state_parts("actor", InMemory(state), 0)  # type: ignore[arg-type]
    for strategy, handle in zip(strategies, handles, strict=True):
        backward(strategy, "actor", handle)
        strategy.step("actor")
    for (key, _, expected), (_, _, found) in zip(*(each.state_parts("actor") for each in strategies), strict=True):
        for kind, part in expected.items():
            assert torch.equal(found[kind].values, part.values), (key, kind)


def test_an_optimizer_that_counts_in_its_groups_is_refused_where_it_is_saved(tiny: Path) -> None:
    strategy = single("fp64")
    given = Optimizer(f"{__name__}.Counts", lr=1.0, arguments={"of_group": True})
    strategy.setup_role("actor", trained(tiny, given), tiny)
    wanted = r"Counts', whose step changes `step` of its groups, .* `trainer.save_every_seconds` to null"
    with pytest.raises(UserError, match=wanted):
        strategy.state_bytes("actor")
    with pytest.raises(UserError, match=wanted):
        strategy.load_state_parts("actor", InMemory({}), 2)  # type: ignore[arg-type]
