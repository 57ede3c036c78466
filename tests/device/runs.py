"""Runs on the CPU and on the simulated device, which is set up in the ranks that run them, not here."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist

from rlflow.callbacks import Callback
from rlflow.strategies import DeepSpeedStrategy, SingleProcess
from tests.controller.runs import Fit, Result, fit

Where = tuple[str, str]  # an operation, and the line of rlflow that asked for it


class KeepsWaits(Callback):
    """Keeps what was counted in each step, from the end of one to the end of the next; the first has the set-up.

    Args:
        counted: Counts on.
    """

    def __init__(self, counted: Counter[Where]) -> None:
        self.steps: list[Counter[Where]] = []
        self._counted = counted

    def on_step_end(self, trainer: Any, module: Any, step: int, metrics: Any) -> None:
        self.steps.append(self._counted.copy())
        self._counted.clear()


def fit_on_cpu(run: Fit) -> Result:
    """Run on the CPU: one process without DeepSpeed, more with its stage 0."""
    alone = dist.get_world_size() == 1
    strategy = SingleProcess if alone else partial(DeepSpeedStrategy, 0)
    return replace(fit(replace(run, folder=run.folder / "cpu", strategy=strategy)), record=None)


def fit_on_device(run: Fit, token_budget: int = 4096) -> tuple[Result, list[Counter[Where]]]:
    """Run on the device, else alike; with how often the host waited for it in each step."""
    from tests.device.simulated_device import DEVICE, waits
    from tests.device.strategies import DeepSpeedElsewhere, SingleProcessElsewhere, deepspeed_elsewhere

    strategy = partial(SingleProcessElsewhere if dist.get_world_size() == 1 else DeepSpeedElsewhere, token_budget)
    with waits() as counted, deepspeed_elsewhere():
        kept = KeepsWaits(counted)
        settings = {**run.settings, "callbacks": [*run.settings.get("callbacks", ()), kept]}
        result = fit(replace(run, folder=run.folder / "device", strategy=strategy, settings=settings))
    assert all(weight.device == DEVICE for weight in result.weights.values())
    weights = {name: weight.cpu() for name, weight in result.weights.items()}
    return replace(result, weights=weights, record=None), kept.steps


def fit_on_both(run: Fit) -> tuple[Result, Result]:
    """Run on the CPU, and then on the device."""
    import tests.device.simulated_device  # noqa: F401 - autograd starts threads for the devices that are there at its first use

    return fit_on_cpu(run), fit_on_device(run)[0]
