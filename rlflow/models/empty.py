"""What transformers leaves undone of a model that it builds without memory."""

from __future__ import annotations

from typing import Any

import torch

from rlflow.models.tensor_range import TensorRange
from rlflow.models.weight_files import WeightFiles

COMPARED = 1 << 20  # elements at once


def finish(model: Any, files: WeightFiles) -> None:
    """Tie what is tied, and compute the buffers that no file holds, such as a rotary embedding's frequencies.

    Args:
        model: A transformers model whose parameters are on the device `meta`.
        files: Its weights.
    """
    _tie(model, files)
    owners = set()
    for name, buffer in model.named_non_persistent_buffers():
        path, _, key = name.rpartition(".")
        owner = model.get_submodule(path)
        owner._buffers[key] = torch.empty_like(buffer, device="cpu")
        owners.add(owner)
    for owner in owners:
        owner._is_hf_initialized = False  # so `initialize_weights` does it once more, and no other
    with torch.random.fork_rng(devices=[]):
        model.initialize_weights()


def _tie(model: Any, files: WeightFiles) -> None:
    """Transformers ties weights that are equal where files hold both, and cannot compare them on the device `meta`."""
    for target, source in list(model.all_tied_weights_keys.items()):
        if model.get_parameter(target) is model.get_parameter(source):
            continue
        if _equal(files, target, source):
            path, _, key = target.rpartition(".")
            setattr(model.get_submodule(path), key, model.get_parameter(source))
        else:
            del model.all_tied_weights_keys[target]


def _equal(files: WeightFiles, first: str, second: str) -> bool:
    shape = files.shape(first)
    if shape != files.shape(second):
        return False
    for start in range(0, shape.numel(), COMPARED):
        length = min(COMPARED, shape.numel() - start)
        parts = [TensorRange(start, torch.empty(length, dtype=torch.float64)) for _ in range(2)]
        for name, part in zip((first, second), parts, strict=True):
            files.read(name, part)
        if not torch.equal(parts[0].values, parts[1].values):
            return False
    return True
