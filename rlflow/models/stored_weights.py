"""The weights of a model as its files have them, in buckets, as a trained role's come."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from rlflow.models.scoring import ScoringModel


def stored_weights(
    path: Path, dtype: torch.dtype, bucket_bytes: int, trust_remote_code: bool = False
) -> Iterator[list[tuple[str, Tensor]]]:
    """Full tensors on the CPU by Hugging Face name; tied ones come once. The model is held whole meanwhile.

    Args:
        path: A folder in Hugging Face form, or a Hugging Face name.
        dtype: Of the tensors.
        bucket_bytes: A bucket holds at most this, or one larger tensor.
        trust_remote_code: Whether code that lies beside the weights may run.
    """
    model = ScoringModel.load(path, dtype, torch.device("cpu"), trust_remote_code=trust_remote_code)
    bucket: list[tuple[str, Tensor]] = []
    held = 0
    for weight in model.weights():
        tensor = weight.parameter.detach()
        if bucket and held + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, held = [], 0
        bucket.append((weight.name, tensor))
        held += tensor.nbytes
    if bucket:
        yield bucket
