"""Shared by the references: ragged batches of float64 and means over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import sqrt

import torch
from torch import Tensor

Ragged = Sequence[Tensor]  # one tensor [|o_i|] for each response


def ragged(rows: Sequence[Sequence[float]], grad: bool = False) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.float64, requires_grad=grad) for row in rows]


def gradient(loss: Callable[[list[Tensor]], Tensor], log_pi: Ragged) -> list[list[float]]:
    """d loss / d log pi, token by token."""
    leaves = [row.detach().clone().requires_grad_() for row in log_pi]
    loss(leaves).backward()
    return [[0.0] * len(row) if row.grad is None else row.grad.tolist() for row in leaves]


def token_mean(per_token: Sequence[Sequence[Tensor]]) -> Tensor:
    """1 / sum_i |o_i| * sum_i sum_t."""
    return sum_of(term for row in per_token for term in row) / sum(len(row) for row in per_token)


def response_mean(per_token: Sequence[Sequence[Tensor]]) -> Tensor:
    """1 / G * sum_i 1 / |o_i| * sum_t."""
    return sum_of(sum_of(row) / len(row) for row in per_token) / len(per_token)


def sum_of(terms: Iterable[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for term in terms:
        total = total + term
    return total


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def std(numbers: Sequence[float], ddof: int) -> float:
    center = mean(numbers)
    return sqrt(sum((x - center) ** 2 for x in numbers) / (len(numbers) - ddof))
