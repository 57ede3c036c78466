"""Seeded batches on which functions and nodes are compared with the references from the papers.

Responses of several lengths, ratios within and beyond every clip, advantages of both signs and 0, a group with one
right answer, one with equal rewards and one of anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.testing import assert_close

from tests.reference.papers.ragged import Ragged

LENGTHS = (5, 1, 3, 4, 2, 6, 3, 1, 7, 2, 1, 4)
GROUP = 4
SEEDS = range(3)

assert_tight = partial(assert_close, rtol=1e-12, atol=1e-14)


def assert_rows(found: Ragged, wanted: Sequence[Sequence[float]]) -> None:
    for row, numbers in zip(found, wanted, strict=True):
        assert_tight(row, torch.tensor(numbers, dtype=torch.float64))


@dataclass(frozen=True)
class Batch:
    """`[B, T]` in float64 unless said; on padding stand numbers that must have no part in anything.

    Attributes:
        log_pi: Logprobs of the policy in training.
        log_old: Logprobs of the policy at the start of the step.
        log_mu: Logprobs of the engine.
        log_ref: Logprobs of the reference.
        mask: Bool.
        A: `[B]`, an advantage of each response.
        A_t: An advantage of each token.
        rewards: `[B]`.
        group: `[B]` int64.
        lengths: `[B]` int64.
    """

    log_pi: Tensor
    log_old: Tensor
    log_mu: Tensor
    log_ref: Tensor
    mask: Tensor
    A: Tensor
    A_t: Tensor
    rewards: Tensor
    group: Tensor
    lengths: Tensor

    def rows(self, x: Tensor) -> list[Tensor]:
        """The tokens of each response, without padding."""
        return [row[:n] for row, n in zip(x, LENGTHS, strict=True)]

    def groups(self, x: Tensor) -> list[list[float]]:
        """`x` `[B]` by groups."""
        return x.reshape(-1, GROUP).tolist()


def batch(seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(LENGTHS)
    B, T = len(LENGTHS), max(LENGTHS)
    mask = torch.arange(T) < lengths[:, None]

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=draw, dtype=torch.float64)

    def beside(x: Tensor, spread: float) -> Tensor:
        return (x + uniform(-spread, spread, B, T)).clamp(max=-1e-3).masked_fill(~mask, 7.0)

    log_pi = uniform(-2.5, -0.05, B, T)
    log_old = beside(log_pi, 0.9)
    for token, log_ratio in {
        (0, 1): 2.5,
        (3, 2): 1.6,
        (8, 0): 3.0,
    }.items():  # beyond every clip, and CPGD's of the drift
        log_old[token] = log_pi[token] - log_ratio
    A = uniform(-1.5, 1.5, B)
    A[0], A[3], A[4] = 0.8, -1.1, 0.0
    rewards = torch.cat([torch.tensor([0.0, 1, 0, 0, 0.7, 0.7, 0.7, 0.7]), uniform(-1, 2, 4)]).double()
    return Batch(
        log_pi=log_pi.masked_fill(~mask, 3.0),
        log_old=log_old,
        log_mu=beside(log_old.masked_fill(~mask, -1.0), 0.3),
        log_ref=beside(log_pi, 0.9),
        mask=mask,
        A=A,
        A_t=uniform(-1.5, 1.5, B, T),
        rewards=rewards,
        group=torch.arange(B) // GROUP + 11,
        lengths=lengths,
    )
