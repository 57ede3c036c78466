"""Bytes as the tensors that collectives carry, and back."""

from __future__ import annotations

import torch
from torch import Tensor


def to_message(said: bytes) -> Tensor:
    """`[len(said)]` uint8, on the CPU."""
    return torch.frombuffer(bytearray(said), dtype=torch.uint8) if said else torch.empty(0, dtype=torch.uint8)


def from_message(message: Tensor) -> bytes:
    """What `to_message` was given, from any device."""
    said: bytes = message.cpu().numpy().tobytes()
    return said
