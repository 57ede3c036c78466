"""Callbacks and hyperparameters against Lightning's own; importing its trainer takes seconds, so all of it is slow.

`test_early_stopping.py` and `tests/test_from_lightning.py` have the same with numbers worked out by hand.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from rlflow.callbacks import EarlyStopping, Timer
from rlflow.module import RLModule
from tests.callbacks.test_early_stopping import stops_after

pytestmark = pytest.mark.slow


def test_early_stopping_stops_where_lightning_s_does() -> None:
    from lightning.pytorch.callbacks import EarlyStopping as Theirs

    draw = random.Random(0)
    for _ in range(500):
        given: dict[str, Any] = {
            "mode": draw.choice(["min", "max"]),
            "patience": draw.randint(1, 4),
            "min_delta": draw.choice([0.0, 0.15]),
            "check_finite": draw.random() < 0.5,
            # Off the grid of the values: Lightning's stops beyond the threshold alone, against its documentation.
            "stopping_threshold": draw.choice([None, 0.05, 0.95]),
            "divergence_threshold": draw.choice([None, 0.05, 0.95]),
        }
        values = [draw.choice([*(n / 10 for n in range(11)), math.nan]) for _ in range(12)]
        theirs, expected = Theirs("val/accuracy", **given), None
        for look, value in enumerate(values, start=1):
            if theirs._evaluate_stopping_criteria(torch.tensor(value, dtype=torch.float64))[0]:
                expected = look
                break
        assert stops_after(EarlyStopping("val/accuracy", **given), values) == expected, (given, values)


@pytest.mark.parametrize("duration", ["01:02:03:04", {"weeks": 1, "minutes": 2}])
def test_a_duration_is_lightning_s(duration: Any) -> None:
    from lightning.pytorch.callbacks import Timer as Theirs

    assert Timer(duration).time_remaining() == Theirs(duration).time_remaining()


def test_hyperparameters_are_those_of_lightning_s_module() -> None:
    from lightning.pytorch import LightningModule

    def of(base: type) -> dict[str, Any]:
        class Parent(base):  # type: ignore[misc]
            def __init__(self, lr: float, names: tuple[str, ...] = ("a",), **more: Any) -> None:
                super().__init__()
                self.save_hyperparameters(ignore="names")

        class Child(Parent):
            def __init__(self, size: int, deep: int = 2) -> None:
                super().__init__(0.5, wide=3)

        return dict(Child(7).hparams)

    assert of(RLModule) == of(LightningModule) == {"lr": 0.5, "wide": 3, "size": 7, "deep": 2}
