from __future__ import annotations

import torch

from rlflow.functional.shapes import token_mean, token_sum


def test_sums_and_means_take_the_tokens_of_each_row() -> None:
    x, mask = torch.tensor([[1.0, 2.0, 9.0], [4.0, 5.0, 6.0]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert token_sum(x, mask).tolist() == [3.0, 15.0]
    assert token_mean(x, mask).tolist() == [1.5, 5.0]


def test_a_row_without_tokens_has_sum_and_mean_0() -> None:
    x, mask = torch.tensor([[torch.nan, torch.inf]]), torch.zeros(1, 2)
    assert token_sum(x, mask).tolist() == token_mean(x, mask).tolist() == [0.0]
