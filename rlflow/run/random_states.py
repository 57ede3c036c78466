"""The random generators of a process, which rewards and nodes of a user's may draw from."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy
import torch


def taken(device: torch.device) -> dict[str, Any]:
    """The states of Python's, numpy's and torch's own generators, JSON-able.

    Args:
        device: Of the rank; a GPU's generator is among them.
    """
    version, words, gauss = random.getstate()
    kind, keys, place, has_gauss, cached = numpy.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, [int(key) for key in keys], place, has_gauss, cached],
        "torch": _to_text(torch.get_rng_state()),
        "cuda": _to_text(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
    }


def restore(states: dict[str, Any], device: torch.device) -> None:
    """Set the generators to what `taken` gave."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, place, has_gauss, cached = states["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), place, has_gauss, cached))
    torch.set_rng_state(_from_text(states["torch"]))
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(_from_text(states["cuda"]), device)


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _from_text(state: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8)
