"""64 bits by which two tensors are told apart."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

CHUNK = 1 << 18  # 64-bit words multiplied at once: bounds the memory of a fingerprint to 2 MiB
MULTIPLIER = 0x5851F42D4C957F2D  # odd, so that no chunk is lost modulo 2**64


def fingerprint(tensor: Tensor) -> Tensor:
    """64 bits (0-dim int64, on the tensor's device) that differ when an element's value or place differs.

    The bits, as 64-bit words, times fixed random odd numbers, summed modulo 2**64: one changed word always shows, many
    do but for chance. -0.0 and 0.0 are the same value.
    """
    per_word = 8 // tensor.element_size()
    factors = _factors(tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in torch.split(tensor.reshape(-1), CHUNK * per_word):
        values = torch.nn.functional.pad(part + 0.0, (0, -len(part) % per_word))
        words = values.view(torch.int64)
        total = total * MULTIPLIER + (words * factors[: len(words)]).sum()
    return total


@cache
def _factors(device: torch.device) -> Tensor:
    limit = 2**62
    seeded = torch.Generator().manual_seed(0)
    return (2 * torch.randint(-limit, limit, (CHUNK,), generator=seeded) + 1).to(device)
