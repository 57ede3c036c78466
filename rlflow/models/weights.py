"""The weights of a model: their names with and without adapters, their values, and digests to compare them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

ADAPTER = "default"  # peft's name of a model's only adapter
PARAMETER = re.compile(rf"\.(lora_[AB])\.{ADAPTER}\.")
CHUNK = 1 << 18  # 64-bit words, 2 MiB: after so many the random numbers of a fingerprint repeat
Item = TypeVar("Item")
MULTIPLIER = 0x5851F42D4C957F2D  # odd, so that no chunk is lost modulo 2**64


@dataclass(frozen=True)
class Weight:
    """A tensor that a model computes with.

    Attributes:
        name: Name of the weight in Hugging Face form, such as `model.layers.0.self_attn.q_proj.weight`.
        parameter: The weight without its adapter; or a buffer that is stored in the model's files.
        adapter: The peft layer whose adapter is added to the weight; None if it has no adapter.
    """

    name: str
    parameter: nn.Parameter
    adapter: Any = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters from which `value` is computed."""
        if self.adapter is None:
            return [self.parameter]
        return [self.parameter, self.adapter.lora_A[ADAPTER].weight, self.adapter.lora_B[ADAPTER].weight]

    def value(self, whole: Callable[[nn.Parameter], Tensor] = nn.Parameter.detach) -> Tensor:
        """The parameter itself, or a new tensor with its adapter merged in: added in float32 at least, then rounded.

        Args:
            whole: Function that returns the full tensor of a parameter, also where ranks divide it.
        """
        weight, *factors = map(whole, self.parameters)
        if not factors:
            return weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        a, b = (factor.to(dtype) for factor in factors)
        product = (b @ a) * self.adapter.scaling[ADAPTER]
        merged: Tensor = weight.to(dtype) + (product.T if self.adapter.fan_in_fan_out else product)
        return merged.to(weight.dtype)


def stored_buffers(model: Any) -> list[tuple[str, Any]]:
    """The buffers of a transformers model that its files hold, such as the bias that corrects a router's choice."""
    computed = {name for name, _ in model.named_non_persistent_buffers()}
    return [(name, buffer) for name, buffer in model.named_buffers() if name not in computed]


def in_buckets(items: Iterable[Item], size: Callable[[Item], int], limit: int) -> Iterator[list[Item]]:
    """Weights or other items in their order, in buckets of at most `limit`; a larger item is a bucket by itself.

    Args:
        items: Items, such as the weights of a model.
        size: Returns the size of an item, such as the bytes of a whole weight.
        limit: Largest size of a bucket.
    """
    bucket: list[Item] = []
    filled = 0
    for item in items:
        more = size(item)
        if bucket and filled + more > limit:
            yield bucket
            bucket, filled = [], 0
        bucket.append(item)
        filled += more
    if bucket:
        yield bucket


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return PARAMETER.search(name) is not None


def plain_name(name: str) -> str:
    """A parameter's name without peft's additions; for a parameter of an adapter, its name in peft's files."""
    return PARAMETER.sub(r".\1.", name.replace(".base_layer.", "."))


def digest_of(weights: Iterable[tuple[str, Tensor]]) -> str:
    """16 hexadecimal digits that change when a weight of a model changes.

    Args:
        weights: Weights by Hugging Face name, without adapters; each is read before the next is taken.
    """
    fingerprints = {name: fingerprint(weight) for name, weight in weights}
    numbers = torch.stack(list(fingerprints.values())).tolist()
    lines = (f"{name} {number}" for name, number in zip(fingerprints, numbers, strict=True))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def fingerprint(tensor: Tensor, together: int | None = None) -> Tensor:
    """64 bits (0-dim int64, on the tensor's device) that differ when an element's value or place differs.

    It is the sum of the tensor's 64-bit words times fixed random odd numbers, modulo 2**64. A change of one word always
    changes it; a change of several words may leave it the same only by chance. -0.0 and 0.0 count as the same value.

    Args:
        tensor: Tensor of any shape.
        together: Chunks that are multiplied at a time, which changes no bit. None for 1 on the CPU, whose cache holds
            that much, and 64 elsewhere, where each operation is a kernel to launch.
    """
    together = together or (1 if tensor.is_cpu else 64)
    per_word = 8 // tensor.element_size()
    factors, powers = _factors(tensor.device), _powers(together, tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in torch.split(tensor.reshape(-1), together * CHUNK * per_word):
        words = torch.nn.functional.pad(part + 0.0, (0, -len(part) % per_word)).view(torch.int64)
        if whole := len(words) // CHUNK:
            sums = (words[: whole * CHUNK].view(whole, CHUNK) * factors).sum(1)
            total = total * powers[whole] + (sums * powers[:whole].flip(0)).sum()
        if len(rest := words[whole * CHUNK :]):
            total = total * MULTIPLIER + (rest * factors[: len(rest)]).sum()
    return total


@cache
def _powers(count: int, device: torch.device) -> Tensor:
    """`MULTIPLIER**k` for k from 0 to `count`, modulo 2**64."""
    powers = torch.ones(count + 1, dtype=torch.int64)
    powers[1:] = MULTIPLIER
    return powers.cumprod(0).to(device)


@cache
def _factors(device: torch.device) -> Tensor:
    limit = 2**62
    seeded = torch.Generator().manual_seed(0)
    return (2 * torch.randint(-limit, limit, (CHUNK,), generator=seeded) + 1).to(device)
