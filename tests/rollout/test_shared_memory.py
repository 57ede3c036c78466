"""Memory that two processes map."""

from __future__ import annotations

import os

import torch

from rlflow.rollout.engine import Piece
from rlflow.rollout.engine_subprocess import mapped, share

ROWS, COLUMNS = 1024, 1024  # 4 KiB a row: a page


def test_of_a_tensor_only_the_pieces_that_are_held_take_memory_and_have_their_values() -> None:
    tensor = torch.randn(ROWS, COLUMNS)
    pieces = [Piece("weight", "weight", 16, start=8), Piece("weight", "weight", 4, start=512)]
    descriptor = share(tensor, [piece.cut for piece in pieces])
    shared = mapped(descriptor, tensor.shape, tensor.dtype)
    assert os.fstat(descriptor).st_blocks * 512 == 20 * 4096
    os.close(descriptor)
    expected = torch.zeros_like(tensor)
    expected[8:24], expected[512:516] = tensor[8:24], tensor[512:516]
    assert torch.equal(shared, expected)


def test_a_slice_of_columns_has_their_values() -> None:
    tensor = torch.randn(8, COLUMNS)
    descriptor = share(tensor, [Piece("weight", "weight", 512, dim=1, start=512).cut])
    shared = mapped(descriptor, tensor.shape, tensor.dtype)
    os.close(descriptor)
    assert torch.equal(shared[:, 512:], tensor[:, 512:])
    assert not shared[:, :512].any()


def test_without_pieces_the_whole_tensor_is_shared() -> None:
    tensor = torch.randn(3, 5)
    descriptor = share(tensor)
    assert torch.equal(mapped(descriptor, tensor.shape, tensor.dtype), tensor)
    os.close(descriptor)
