from __future__ import annotations

import pytest
import torch

from rlflow.rollout.engine import Piece, WeightFingerprints, WeightSyncError

PIECES = (
    Piece("a", "ab", 2),
    Piece("b", "ab", 3, start=3, row=2),  # the second half of b's six rows
    Piece("c", "c", 2, dim=1, start=2),  # the second half of c's four columns
)


def _sent() -> dict[str, torch.Tensor]:
    return {"a": torch.randn(2, 4), "b": torch.randn(6, 4), "c": torch.randn(5, 4)}


def test_slices_held_as_sent_pass() -> None:
    tensors = _sent()
    manifest = WeightFingerprints(PIECES, torch.float32)
    assert [name for name, _ in manifest.watch([list(tensors.items())])] == ["a", "b", "c"]
    held = torch.cat((tensors["a"], tensors["b"][3:]))
    columns = tensors["c"][:, 2:]
    manifest.check([(PIECES[0], PIECES[0].held(held)), (PIECES[1], PIECES[1].held(held)), (PIECES[2], columns)])
    assert (manifest.tensors, manifest.nbytes) == (3, 4 * (8 + 24 + 20))


def test_a_tensor_held_otherwise_is_named_with_its_place() -> None:
    tensors = _sent()
    manifest = WeightFingerprints(PIECES, torch.float32)
    list(manifest.watch([list(tensors.items())]))
    other_half = torch.cat((tensors["a"], tensors["b"][:3]))
    held = [(piece, piece.held(other_half)) for piece in PIECES[:2]] + [(PIECES[2], tensors["c"][:, 2:])]
    with pytest.raises(WeightSyncError, match=r"report this as a bug\. held otherwise: b \(in ab\)$"):
        manifest.check(held)


def test_tensors_that_were_not_sent_are_named() -> None:
    tensors = _sent()
    manifest = WeightFingerprints(PIECES, torch.float32)
    list(manifest.watch([[("b", tensors["b"])]]))
    held = torch.cat((tensors["a"], tensors["b"][3:]))
    with pytest.raises(WeightSyncError, match=r"report this as a bug\. not sent: a, c$"):
        manifest.check([(piece, piece.held(held)) for piece in PIECES[:2]])


def test_a_tensor_that_the_engine_does_not_have_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="sends `value_head`, which the engine does not have; take another"):
        list(WeightFingerprints(PIECES, torch.float32).watch([[("value_head", torch.zeros(1))]]))


def test_tensors_pass_in_the_engines_dtype() -> None:
    tensor = torch.randn(2, 4)
    ((_, cast),) = WeightFingerprints(PIECES, torch.bfloat16).watch([[("a", tensor)]])
    assert torch.equal(cast, tensor.to(torch.bfloat16))
