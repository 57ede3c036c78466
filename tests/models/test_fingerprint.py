from __future__ import annotations

import pytest
import torch

from rlflow.models.weights import CHUNK, fingerprint


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_element_changed_by_its_smallest_step_changes_the_fingerprint(dtype: torch.dtype) -> None:
    tensor = torch.randn(7, 9).to(dtype)  # 63 elements fill no whole number of 64-bit words
    before = fingerprint(tensor)
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()]
    for row, column in ((0, 0), (3, 4), (6, 8)):
        tensor.view(integer)[row, column] += 1
        assert fingerprint(tensor) != before
        tensor.view(integer)[row, column] -= 1
    assert fingerprint(tensor) == before


def test_an_element_behind_the_first_chunk_counts() -> None:
    tensor = torch.zeros(4 * CHUNK + 1)
    before = fingerprint(tensor)
    tensor[-1] = 1.0
    assert fingerprint(tensor) != before


def test_exchanged_rows_change_the_fingerprint() -> None:
    tensor = torch.randn(4, 8)
    assert fingerprint(tensor) != fingerprint(tensor[[1, 0, 2, 3]])


def test_exchanged_chunks_change_the_fingerprint() -> None:
    tensor = torch.randn(2, 2 * CHUNK)  # two float32 fill a word
    assert fingerprint(tensor) != fingerprint(tensor.flip(0))


def test_strides_do_not_change_the_fingerprint() -> None:
    tensor = torch.randn(5, 6)
    assert fingerprint(tensor.T.contiguous().T) == fingerprint(tensor)


def test_negative_zero_is_zero() -> None:
    assert fingerprint(torch.tensor([-0.0, 1.0])) == fingerprint(torch.tensor([0.0, 1.0]))
