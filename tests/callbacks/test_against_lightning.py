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
from rlflow.databuffer.transport import Transport
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


def test_metrics_of_uneven_batches_are_those_that_lightning_logs() -> None:
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader

    from tests.context.test_logged import running

    batches = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0])]
    reductions: list[Any] = ["mean", "sum", "MAX", torch.min]

    def log(module: Any, batch: torch.Tensor) -> None:
        for number, reduce_fx in enumerate(reductions):
            module.log(f"{number}", batch.sum(), reduce_fx=reduce_fx, on_epoch=True, on_step=False, sync_dist=True)
        module.log_dict({"weighted": batch.mean()}, batch_size=2 * len(batch) - 1, prog_bar=True)

    class Theirs(LightningModule):
        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            log(self, batch)

    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    (theirs,) = trainer.validate(Theirs(), DataLoader(batches, batch_size=None), verbose=False)  # type: ignore[arg-type]
    module, metrics = running([0.0])
    context = module._context
    assert context is not None
    assert context.running is not None
    context.running.validates = True
    for batch in batches:
        context.running.rows = batch
        log(module, batch)
    # Means weighted by rows: of 6 three times and 10 once; and of 2 five times and 10 once.
    expected = {"0": 7.0, "1": 16.0, "2": 10.0, "3": 6.0, "weighted": 20 / 6}
    assert metrics.reduce(0, Transport()) == pytest.approx(expected)
    assert theirs == pytest.approx(expected)
