"""The rate of matrix products on this machine, and how many of them a forward pass needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.step.timing import over_ranks
from benchmarks.step.workloads import Sizes, Workload

ROWS = 2048  # of the product whose rate is measured
REPEATS = 10


def gemm_rate(workload: Workload) -> float:
    """Operations a second of the slower rank, both at work: the fastest product of a shape that the model has.

    Torch's own product and oneDNN's are tried, and the faster counts.
    """
    hidden, wide = workload.sizes.hidden_size, workload.sizes.intermediate_size
    left = torch.randn(ROWS, hidden, dtype=workload.dtype)
    right = torch.randn(wide, hidden, dtype=workload.dtype)
    best = min(_seconds(product, left, right) for product in (_torch, _onednn))
    return over_ranks(2 * ROWS * hidden * wide / best, dist.ReduceOp.MIN)


def _seconds(product: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor) -> float:
    found = []
    for _ in range(REPEATS):
        dist.barrier()
        started = time.perf_counter()
        product(left, right)
        found.append(time.perf_counter() - started)
    return min(found[1:])


def _torch(left: Tensor, right: Tensor) -> Tensor:
    return left @ right.T


def _onednn(left: Tensor, right: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
    return product


def weights_of_products(sizes: Sizes) -> int:
    """Weights of the linear layers but the output layer."""
    width = sizes.hidden_size // sizes.heads
    attention = 2 * sizes.hidden_size * width * (sizes.heads + sizes.kv_heads)
    return sizes.layers * (attention + 3 * sizes.hidden_size * sizes.intermediate_size)


def forward_operations(sizes: Sizes, lengths: Sequence[int]) -> float:
    """Operations of a forward pass over sequences of these lengths: linear layers, and scores and sums of attention.

    A token attends to those before it and itself; what a mask hides is not counted. The output layer, 0.3 % of the
    smaller model, is left out.
    """
    linear = 2.0 * weights_of_products(sizes) * sum(lengths)
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    return linear + 4.0 * sizes.layers * sizes.hidden_size * pairs


def training_operations(workload: Workload, lengths: Sequence[int]) -> float:
    """Operations of a forward and backward pass: three forwards, less the gradients of weights that adapters freeze."""
    whole = 3 * forward_operations(workload.sizes, lengths)
    if workload.lora is None:
        return whole
    return whole - 2.0 * weights_of_products(workload.sizes) * sum(lengths)
