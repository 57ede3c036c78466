"""Number of times that the host waits for its device in a step, which no size makes grow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlflow import RLModule
from rlflow.data.prompts import PromptData
from rlflow.models.tiny import write_tiny_model
from tests.controller.runs import Fit, sums
from tests.device.runs import Where, fit_on_device
from tests.device.test_steps import APART, dpo, grpo, pairs, ppo
from tests.ranks import RankPool
from tests.slow import slow_but

Waits = list[Counter[Where]]


def write_model(folder: Path, layers: int) -> Path:
    return write_tiny_model(folder, hidden_size=32, intermediate_size=48, layers=layers, max_position=256)


def second_step(run: Fit, token_budget: int, ranks: RankPool) -> Waits:
    """Waits of each rank in the second step, outside generation."""
    of_ranks = [waits[1] for _, waits in ranks.run(fit_on_device, run, token_budget)]
    return [Counter({where: n for where, n in waits.items() if where[1] != "generating"}) for waits in of_ranks]


def small_and_large(
    make: Callable[..., RLModule], folder: Path, ranks: RankPool, data: Callable[[int], PromptData], **settings: Any
) -> tuple[Waits, Waits]:
    """Waits of a step, and of one with twice the rows of up to twice the tokens, twice the layers, in micro-batches."""
    given = {"max_steps": 2, **settings}
    models = [write_model(folder / str(layers), layers) for layers in (1, 2)]
    small = Fit(make(models[0]), data(4), folder / "small", settings=given)
    large = Fit(make(models[1], max_response_length=24), data(8), folder / "large", settings=given)
    return second_step(small, 4096, ranks), second_step(large, 64, ranks)


def prompts(count: int) -> PromptData:
    """So many a step."""
    return sums(2 * count, count)


def test_a_grpo_step_waits_nine_times_whatever_its_size(tmp_path: Path, device1: RankPool) -> None:
    (small,), (large,) = small_and_large(grpo, tmp_path, device1, prompts)
    assert small == large
    # Groups of equal prompts, for the advantages and for the share that has a signal: 2 each. Once the fingerprints of
    # a sync, the norm of an update's gradient, and the metrics. Whether rewards and advantages are finite: 2.
    assert small.total() == 9, small


def test_a_ppo_step_waits_twenty_one_times_whatever_its_size(tmp_path: Path, device1: RankPool) -> None:
    (small,), (large,) = small_and_large(ppo, tmp_path, device1, prompts)
    assert small == large
    # Moments of advantages, returns and values: 12. Two norms; fingerprints and metrics. Groups and all rows: 3.
    # Whether rewards and advantages are finite: 2.
    assert small.total() == 21, small


def test_a_step_on_pairs_waits_twice_whatever_its_size(tmp_path: Path, device1: RankPool) -> None:
    (small,), (large,) = small_and_large(dpo, tmp_path, device1, pairs)
    assert small == large
    assert small.total() == 2, small  # the norm, and the metrics


@pytest.mark.parametrize("settings", slow_but([{"placement": APART}], [{"balance": "off"}, {"placement": APART}]))
def test_among_ranks_no_size_adds_a_wait(settings: dict[str, Any], tmp_path: Path, device2: RankPool) -> None:
    small, large = small_and_large(grpo, tmp_path, device2, prompts, **settings)
    assert small == large
