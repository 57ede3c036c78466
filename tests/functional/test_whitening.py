from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from rlflow.functional import merge_moments, row_moments, standardize
from rlflow.functional.whitening import broken_rows, not_finite

GLOBAL_BATCH = torch.tensor([1.0, 1.0, -1.0, -3.0])
EVERYWHERE = torch.ones(4, dtype=torch.bool)


def moments(x: Tensor, mask: Tensor) -> Tensor:
    return merge_moments(row_moments(x, mask))


def whiten(x: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    return standardize(x, mask, moments(x, mask), unbiased)


def test_whitening_with_the_unbiased_deviation_gives_the_known_numbers(known: dict[str, Any]) -> None:
    expected = torch.tensor(known["global_whiten"]["unbiased_std"])
    assert_close(whiten(GLOBAL_BATCH, EVERYWHERE), expected, rtol=0, atol=1e-6)


def test_whitening_with_the_population_deviation_gives_the_known_numbers(known: dict[str, Any]) -> None:
    expected = torch.tensor(known["global_whiten"]["population_std"])
    assert_close(whiten(GLOBAL_BATCH, EVERYWHERE, unbiased=False), expected, rtol=0, atol=1e-6)


def test_merged_moments_of_two_ranks_whiten_as_the_global_batch_does(known: dict[str, Any]) -> None:
    here, there = GLOBAL_BATCH[:2], GLOBAL_BATCH[2:]
    both = merge_moments(torch.stack([moments(part, torch.ones(2)) for part in (here, there)]))
    expected = torch.tensor(known["global_whiten"]["unbiased_std"])
    assert_close(standardize(here, torch.ones(2), both), expected[:2], rtol=0, atol=1e-6)
    assert_close(standardize(there, torch.ones(2), both), expected[2:], rtol=0, atol=1e-6)


def test_merged_moments_are_those_of_the_whole() -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 1000
    parts = torch.stack([moments(part, torch.ones_like(part)) for part in x.split([1, 0, 60, 39])])
    assert_close(merge_moments(parts), torch.stack([torch.tensor(100.0), x.mean(), x.var() * 99]).double())


def test_padding_and_other_rows_change_no_bit_of_a_row_s_moments() -> None:
    x = torch.randn(8, 37, generator=torch.Generator().manual_seed(0)) * 3 + 1000
    mask = torch.rand(8, 37, generator=torch.Generator().manual_seed(1)) < 0.7
    whole = row_moments(x, mask)
    for width in (64, 100, 1025):
        wide, counts = torch.full((8, width), torch.nan), torch.zeros(8, width, dtype=torch.bool)
        wide[:, :37], counts[:, :37] = x, mask
        assert torch.equal(row_moments(wide[2:5], counts[2:5]), whole[2:5])
    entries = [row[counts].double() for row, counts in zip(x, mask, strict=True)]
    expected = torch.stack(
        [torch.stack([torch.tensor(float(len(e))), e.mean(), e.var() * (len(e) - 1)]) for e in entries]
    )
    assert_close(whole, expected.double())
    assert row_moments(torch.zeros(2, 0), torch.zeros(2, 0)).tolist() == [[0.0] * 3] * 2


def test_masked_entries_count_nowhere_and_are_zero() -> None:
    x = torch.tensor([[1.0, 99.0], [1.0, torch.nan], [-1.0, -3.0]])
    mask = torch.tensor([[1, 0], [1, 0], [1, 1]])
    whitened = whiten(x, mask)
    assert_close(whitened[mask.bool()], whiten(GLOBAL_BATCH, EVERYWHERE))
    assert whitened[~mask.bool()].tolist() == [0.0, 0.0]


def test_equal_entries_become_exactly_zero_on_one_rank_and_on_many() -> None:
    for size in (1, 2, 3, 12, 48):
        x = torch.full((size,), 0.7, dtype=torch.float64)
        assert (whiten(x, torch.ones(size)) == 0.0).all()
        merged = merge_moments(torch.stack([moments(x, torch.ones(size))] * 3))
        assert (standardize(x, torch.ones(size), merged) == 0.0).all()


def test_nothing_to_whiten_is_not_an_error() -> None:
    assert whiten(torch.zeros(2, 3), torch.zeros(2, 3)).tolist() == [[0.0] * 3] * 2
    assert merge_moments(torch.zeros(2, 3, dtype=torch.float64)).tolist() == [0.0, 0.0, 0.0]


def test_integers_are_not_rounded() -> None:
    assert_close(whiten(torch.tensor([0, 1]), torch.ones(2)), torch.tensor([-(0.5**0.5), 0.5**0.5]))


@pytest.mark.parametrize("entry", [torch.nan, torch.inf])
def test_what_is_not_finite_is_named_by_its_row(entry: float) -> None:
    x = torch.tensor([[1.0, torch.nan], [1.0, entry], [-1.0, -3.0]])
    for numbers, mask in ((x, torch.tensor([[1, 0], [1, 1], [1, 1]])), (x[:, 1], torch.tensor([0, 1, 1]))):
        rows = broken_rows(numbers, mask).nonzero().flatten()
        assert str(not_finite(rows)).startswith("row 1, one of 1, has an infinite or NaN entry")
