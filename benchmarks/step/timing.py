"""Seconds of work that both ranks do at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the slower rank, and this rank's result."""
    dist.barrier()
    started = time.perf_counter()
    result = work()
    return slowest(time.perf_counter() - started), result


def slowest(seconds: float) -> float:
    """The most of all ranks."""
    return over_ranks(seconds, dist.ReduceOp.MAX)


def over_ranks(number: float, operation: Any = dist.ReduceOp.SUM) -> float:
    """One number of all ranks'."""
    reduced = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(reduced, operation)
    return float(reduced)
