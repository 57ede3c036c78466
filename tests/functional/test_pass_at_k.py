from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from rlflow.functional import pass_at_k


def estimates(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_pass_at_k_is_that_of_the_paper() -> None:
    # n=4, k=2: C(4,2) = 6 pairs; c=0: 1-6/6; c=1: 1-C(3,2)/6 = 1-3/6; c=2: 1-C(2,2)/6 = 5/6; c=3, 4: no wrong pair
    assert_close(pass_at_k(torch.arange(5), 4, 2), estimates(0, 1 / 2, 5 / 6, 1, 1))


def test_pass_at_1_is_the_share_of_right_responses() -> None:
    assert_close(pass_at_k(torch.tensor([0, 1, 3, 4]), 4, 1), estimates(0, 1 / 4, 3 / 4, 1))


def test_pass_at_n_asks_for_one_right_response() -> None:
    assert_close(pass_at_k(torch.tensor([0, 1, 3]), 3, 3), estimates(0, 1, 1))


def test_many_responses_give_what_binomials_give() -> None:
    exact = [1 - math.comb(200 - c, 100) / math.comb(200, 100) for c in (0, 1, 5, 150)]
    assert_close(pass_at_k(torch.tensor([0, 1, 5, 150]), 200, 100), estimates(*exact), rtol=0, atol=1e-12)


@pytest.mark.parametrize("k", [0, 5])
def test_more_responses_than_there_are_cannot_be_drawn(k: int) -> None:
    with pytest.raises(ValueError, match=f"`k` is {k}; of 4 responses give 1 to 4"):
        pass_at_k(torch.tensor([1]), 4, k)
