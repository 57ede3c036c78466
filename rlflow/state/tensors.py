"""Separates the tensors from a module's state, since the rest is JSON, and puts them back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlflow.values.host_copy import on_host

SEPARATOR = "/"  # between the keys that lead to a tensor


def without_tensors(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A state without its tensors; and the tensors, on the CPU, by the keys that lead to them.

    Args:
        state: State of JSON-able values and tensors, in dicts of any depth.
    """
    rest: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            tensors[key] = on_host(value.detach()).contiguous().clone()  # a file has no two names of one memory
        elif isinstance(value, Mapping):
            rest[key], inside = without_tensors(value)
            tensors |= {f"{key}{SEPARATOR}{name}": tensor for name, tensor in inside.items()}
        else:
            rest[key] = value
    return rest, tensors


def with_tensors(rest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state from which `without_tensors` took the tensors."""
    state = {key: with_tensors(value, {}) if isinstance(value, Mapping) else value for key, value in rest.items()}
    for name, tensor in tensors.items():
        *outer, last = name.split(SEPARATOR)
        place = state
        for key in outer:
            place = place.setdefault(key, {})
        place[last] = tensor
    return state


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's numbers, shape and dtype."""
    head = f"{tensor.dtype} {list(tensor.shape)} ".encode()
    return hashlib.sha256(head + tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
