"""Tensors in memory that two processes of a machine map: no copy between them, no name, nothing left by a crash."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def share(tensor: Tensor, parts: Sequence[Callable[[Tensor], Tensor]] = ()) -> int:
    """A file descriptor of memory that holds a copy of `tensor`; to be closed once the other process has it.

    The memory is counted as that of the processes that map it, and does not need room in `/dev/shm`.

    Args:
        tensor: To be copied.
        parts: Give views of a tensor, of which alone the copy has the values; what is in none of them reads as 0, and
            takes no memory unless it shares a page with one. None for the whole.
    """
    descriptor = os.memfd_create("rlflow-weight")
    os.ftruncate(descriptor, tensor.nbytes)
    there = mapped(descriptor, tensor.shape, tensor.dtype)
    for part in parts or (Tensor.detach,):
        part(there).copy_(part(tensor))
    return descriptor


def mapped(descriptor: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The tensor in shared memory. The memory lasts as long as a tensor, or a view of it, in any process."""
    memory = mmap.mmap(descriptor, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
