"""Quantiles of numbers in parts are those of all numbers together."""

from __future__ import annotations

import itertools
import math
from threading import Barrier, Thread

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlflow.errors import UserError
from rlflow.functional import quantiles

LARGE = 1.7976931348623157e308
SHARES = (0.0, 0.2, 0.5, 0.8, 1.0)


def over_parts(parts: list[Tensor], q: float | tuple[float, ...]) -> list[Tensor]:
    """The results of each part, in a thread of its own that meets the others at every sum."""
    given: list[Tensor] = [torch.empty(0)] * len(parts)
    found: list[Tensor] = [torch.empty(0)] * len(parts)
    all_there = Barrier(len(parts))

    def run(number: int) -> None:
        def total(x: Tensor) -> Tensor:
            given[number] = x
            all_there.wait()
            summed = torch.stack(given).sum(dim=0)
            all_there.wait()
            return summed

        found[number] = quantiles(parts[number], q, total)

    threads = [Thread(target=run, args=(number,)) for number in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@given(
    numbers=st.lists(st.floats(-LARGE / 4, LARGE / 4), min_size=1, max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=3),
)
def test_quantiles_over_parts_are_those_of_torch_in_one_process(numbers: list[float], cuts: list[int]) -> None:
    whole = torch.tensor(numbers, dtype=torch.float64)
    bounds = [0, *sorted(min(cut, len(numbers)) for cut in cuts), len(numbers)]
    expected = torch.quantile(whole, torch.tensor(SHARES, dtype=torch.float64))
    for found in over_parts([whole[a:b] for a, b in itertools.pairwise(bounds)], SHARES):
        assert torch.equal(found, expected)


def test_a_quantile_is_numpy_s_too() -> None:
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(1))  # float32
    (found,) = over_parts([numbers], 0.8)
    assert found.shape == ()
    assert found.item() == pytest.approx(np.quantile(numbers.double().numpy(), 0.8), rel=1e-15)


@pytest.mark.parametrize("numbers", [[-0.0, 0.0, 1.0], [-math.inf, -1.0, math.inf], [5e-324, -5e-324, 0.0], [2.0] * 3])
def test_signs_infinities_and_the_smallest_numbers_keep_their_order(numbers: list[float]) -> None:
    whole = torch.tensor(numbers, dtype=torch.float64)
    (found,) = over_parts([whole], (0.0, 0.5, 1.0))
    assert found.tolist() == sorted(numbers)


def test_no_number_at_all_has_no_quantile() -> None:
    assert over_parts([torch.empty(0), torch.empty(0)], 0.5)[1].isnan()


def test_a_share_beyond_1_and_a_number_that_is_nan_are_refused() -> None:
    with pytest.raises(UserError, match="a quantile of 80 was asked for; give numbers from 0 to 1"):
        quantiles(torch.ones(2), 80, lambda x: x)
    with pytest.raises(UserError, match="over 3 numbers, and 1 of them are NaN; mask them out"):
        quantiles(torch.tensor([1.0, math.nan, 2.0]), 0.5, lambda x: x)
