"""All rows below each row, and numbers computed from them."""

from __future__ import annotations

import pytest
import torch

from rlflow import UserError
from rlflow.types import Each
from rlflow.values.ragged import Ragged

NUMBERS = Each(torch.tensor([3.0, -1.0, 3.0, 5.0]), torch.tensor([3, 0, 1]))  # of three rows, the second has none


def test_numbers_are_summed_by_the_row_above() -> None:
    assert NUMBERS.parent.tolist() == [0, 0, 0, 2]
    assert NUMBERS.sum().tolist() == [5.0, 0.0, 5.0]
    assert NUMBERS.mean().tolist() == [torch.tensor(5 / 3).item(), 0.0, 5.0]


def test_the_largest_and_the_smallest_are_0_where_there_is_none() -> None:
    assert NUMBERS.max().tolist() == [3.0, 0.0, 5.0]
    assert NUMBERS.min().tolist() == [-1.0, 0.0, 5.0]


def test_of_equal_numbers_the_first_is_found_and_where_there_is_none_minus_1() -> None:
    assert NUMBERS.argmax().tolist() == [0, -1, 3]
    assert NUMBERS.argmin().tolist() == [1, -1, 3]


def test_a_negative_maximum_is_not_taken_for_none() -> None:
    below = Each(torch.tensor([-2.0, -3.0]), torch.tensor([0, 2]))
    assert below.max().tolist() == [0.0, -2.0]
    assert below.argmax().tolist() == [-1, 0]


def test_whole_numbers_stay_whole_and_bools_are_counted() -> None:
    assert Each(torch.tensor([1, 2]), torch.tensor([2])).sum().dtype == torch.int64
    right = Each(torch.tensor([True, False, True]), torch.tensor([2, 1]))
    assert right.sum().tolist() == [1, 1]
    assert right.mean().tolist() == [0.5, 1.0]
    assert right.argmax().tolist() == [0, 2]


def test_what_is_computed_of_a_row_does_not_depend_on_its_neighbours() -> None:
    numbers = torch.randn(40, generator=torch.Generator().manual_seed(0))
    alone = Each(numbers[10:17], torch.tensor([7]))
    among = Each(numbers, torch.tensor([10, 7, 0, 23]))
    assert torch.equal(among.mean()[1:2], alone.mean())
    assert torch.equal(among.sum()[1:2], alone.sum())


def test_no_rows_at_all_are_legal() -> None:
    nothing = Each(torch.zeros(0), torch.zeros(3, dtype=torch.int64))
    assert nothing.mean().tolist() == nothing.max().tolist() == [0.0] * 3
    assert nothing.argmax().tolist() == [-1] * 3
    assert Each(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).argmin().tolist() == []


def test_what_is_not_one_number_a_row_is_refused() -> None:
    counts = torch.tensor([1])
    with pytest.raises(
        UserError, match=r"`mean` is of one number for each row, and these `values` are of Ragged; read"
    ):
        Each(Ragged.from_lists([[1]]), counts).mean()
    with pytest.raises(
        UserError, match=r"`max` is of one number for each row, and these `values` are of shape \[1, 2\]"
    ):
        Each(torch.zeros(1, 2), counts).max()
