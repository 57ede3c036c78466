from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlflow.models.weights import CHUNK, MULTIPLIER, _factors, fingerprint


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


@pytest.mark.parametrize("elements", [0, 5, 4 * CHUNK, 4 * CHUNK * 5 + 6])
def test_a_fingerprint_is_the_same_however_many_chunks_are_multiplied_together(elements: int) -> None:
    tensor = torch.randn(elements).to(torch.bfloat16)  # four fill a word
    words = torch.cat([tensor, tensor.new_zeros(-elements % 4)]).view(torch.int64).tolist()
    factors, value = _factors(tensor.device).tolist(), 0
    for start in range(0, len(words), CHUNK):
        products = (word * factor for word, factor in zip(words[start : start + CHUNK], factors, strict=False))
        value = value * MULTIPLIER + sum(products)
    for together in (None, 2, 3, 64):
        assert (int(fingerprint(tensor, together)) - value) % 2**64 == 0


def test_eight_chunks_take_as_many_operations_as_one() -> None:
    counted = []
    for chunks in (1, 8):
        tensor = torch.ones(chunks * CHUNK, dtype=torch.float64)
        fingerprint(tensor, together=8)  # makes the factors, which are kept
        with _Operations() as operations:
            fingerprint(tensor, together=8)
        counted.append(operations.count)
    assert counted[0] == counted[1] < 25


class _Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))
