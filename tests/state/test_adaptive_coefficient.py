"""A coefficient that adapts to what it restrains."""

from __future__ import annotations

import pytest

from rlflow import RLModule, UserError
from rlflow.state import AdaptiveCoefficient


def test_a_coefficient_without_a_target_does_not_change() -> None:
    coefficient = AdaptiveCoefficient(0.1)
    coefficient.update(100.0, rows=10_000)
    assert coefficient.value == 0.1


@pytest.mark.parametrize(
    ("observed", "value"),
    [
        (1.1, 0.1 * (1 + 0.1 * 0.5)),  # 10% above, 500 of 1000 rows
        (0.95, 0.1 * (1 - 0.05 * 0.5)),
        (9.0, 0.1 * (1 + 0.2 * 0.5)),  # an error counts for 20% at most
        (1e-9, 0.1 * (1 - 0.2 * 0.5)),
        (0.0, 0.1),  # nothing has moved yet
    ],
)
def test_a_coefficient_moves_with_the_error(observed: float, value: float) -> None:
    coefficient = AdaptiveCoefficient(0.1, target=1.0, horizon=1000)
    coefficient.update(observed, rows=500)
    assert coefficient.value == pytest.approx(value, rel=1e-12)


def test_a_step_of_many_horizons_leaves_a_coefficient_above_0() -> None:
    coefficient = AdaptiveCoefficient(0.1, target=1.0, horizon=100)
    coefficient.update(0.5, rows=1024)  # by the formula, the factor is 1 - 0.2 * 10.24
    assert coefficient.value == pytest.approx(0.01)


def test_a_coefficient_holds_a_growing_divergence_near_its_target() -> None:
    coefficient, kl = AdaptiveCoefficient(0.01, target=1.0, horizon=100), 0.1
    for _ in range(2000):
        kl = 1 / (0.1 + 10 * coefficient.value)  # the more it is restrained the smaller
        coefficient.update(kl, rows=50)
    assert kl == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(
    "settings", [{"value": -1.0}, {"value": 0.0, "target": 1.0}, {"value": 1.0, "target": 0.0}, {"horizon": 0.0}]
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(UserError):
        AdaptiveCoefficient(**{"value": 1.0, **settings})


@pytest.mark.parametrize(
    ("before", "after", "saved", "value"),
    [
        (1.0, 1.0, {"kl": 0.75}, 0.75),
        (None, None, {}, 0.5),  # a fixed coefficient is a setting, which a resumed run may change
        (1.0, None, {"kl": 0.75}, 0.5),
        (None, 1.0, {}, 0.5),
    ],
)
def test_a_module_keeps_the_coefficients_that_adapt_in_checkpoints(
    before: float | None, after: float | None, saved: dict[str, float], value: float
) -> None:
    class Module(RLModule):
        def __init__(self, value: float, target: float | None) -> None:
            self.kl = AdaptiveCoefficient(value, target)

    old, loaded = Module(0.75, before), Module(0.5, after)
    assert old.state_dict() == saved
    loaded.load_state_dict(old.state_dict())
    assert loaded.kl.value == value


def test_what_a_module_does_not_keep_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="the checkpoint has `kl` of its module, and RLModule keeps no such thing; con"):
        RLModule().load_state_dict({"kl": 0.5})
