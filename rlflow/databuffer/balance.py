"""Even shares of rows: what a row costs, how rows are dealt to shards, and whether moving them pays."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rlflow.errors import UserError


@dataclass(frozen=True)
class Balance:
    """Whether rows move between ranks to even out their cost, and the constants by which `auto` decides.

    Decided from these constants, never from clocks, so that all ranks decide alike and a run can be repeated.

    Args:
        mode: `auto` moves rows where the time saved is predicted to exceed the time of moving them; `off` leaves them
            where they were made, unless the number of shards changes.
        tokens_per_s: Tokens that one rank trains on in a second, in short rows. The default is near a 7B model's on a
            large GPU; for a smaller model imbalance costs less, and rows move a little too readily.
        bytes_per_s: Bytes that one rank receives in a second.
        bytes_per_token: Bytes of all values of a row together: ids, masks, and the log-probabilities of three policies.
        quadratic: Attention's share: a row of t tokens costs t + quadratic * t^2. 0 counts tokens alone; for a plain
            transformer 1 / (12 * its width) counts floating-point operations, as attention then costs as much as all
            else at 12 * width tokens.

    Raises:
        UserError: A constant is not positive, or `quadratic` is negative.
    """

    mode: Literal["auto", "off"] = "auto"
    tokens_per_s: float = 10_000.0
    bytes_per_s: float = 1e9
    bytes_per_token: float = 64.0
    quadratic: float = 0.0

    def __post_init__(self) -> None:
        for name in ("tokens_per_s", "bytes_per_s", "bytes_per_token"):
            if not getattr(self, name) > 0:
                raise UserError(f"`trainer.balance.{name}` is {getattr(self, name):g}; give more than 0")
        if not self.quadratic >= 0:
            raise UserError(f"`trainer.balance.quadratic` is {self.quadratic:g}; give 0 or more")

    def costs(self, tokens: Tensor) -> Tensor:
        """What rows cost, int64, in tokens of short rows; a row of no token costs nothing.

        Args:
            tokens: `[N]` int64.
        """
        if self.quadratic == 0:
            return tokens
        return (tokens + self.quadratic * tokens.double().square()).round().long()

    def predict(self, tokens: Tensor, update: Tensor, here: Tensor, there: Tensor, travels: Tensor) -> Predicted:
        """What moving rows from the shards `here` to `there` saves and takes.

        Args:
            tokens: `[N]` int64.
            update: `[N]`, the mini-batch of each row, from 0; each waits for its slowest shard.
            here: `[N]`, the shard of each row if it does not move, from 0.
            there: `[N]`, its shard after the move.
            travels: `[shards]` bool, where the ranks of a shard receive its rows from others even if none moves.
        """
        if tokens.numel() == 0:
            return Predicted()
        shards = len(travels)
        costs = self.costs(tokens)

        def slowest(shard: Tensor) -> int:
            sums = costs.new_zeros((int(update.max()) + 1) * shards).index_add_(0, update * shards + shard, costs)
            return int(sums.view(-1, shards).max(dim=1).values.sum())

        def arriving(shard: Tensor) -> int:
            """Tokens that the busiest shard receives."""
            comes = travels[shard] | (here != shard)
            return int(tokens.new_zeros(shards).index_add_(0, shard, tokens * comes).max())

        more = max(0, arriving(there) - arriving(here))
        saved = slowest(here) - slowest(there)
        return Predicted(saved / self.tokens_per_s, more * self.bytes_per_token / self.bytes_per_s)


AUTO = Balance()


@dataclass(frozen=True)
class Predicted:
    """What moving rows saves and takes, in seconds of one step.

    Attributes:
        gain_s: Time not spent waiting for the slowest shard of each mini-batch; less than 0 where the move is slower.
        cost_s: Time of receiving rows that would not travel otherwise, on the rank that receives most.
    """

    gain_s: float = 0.0
    cost_s: float = 0.0

    @property
    def pays(self) -> bool:
        """Whether rows should move."""
        return self.gain_s > self.cost_s

    def __add__(self, other: Predicted) -> Predicted:
        return Predicted(self.gain_s + other.gain_s, self.cost_s + other.cost_s)


def deal(costs: Tensor, shards: int) -> Tensor:
    """Deal rows to shards so that counts differ by at most one and sums of costs are nearly even.

    Rows are dealt in rounds of one row a shard. The poorest shards, those no richer than the poorest with one more of
    the dearest rows left, get these, the poorest the dearest; the other shards get the cheapest rows left, so that a
    shard with a very dear row waits for the others. Two sums never differ by more than the dearest row: where the
    poorer of two shards gets the dearer row, the difference shrinks, or turns round and is at most that row.

    Args:
        costs: `[N]` int64, at least 0, in the order of the rows' ids, which breaks ties.
        shards: How many shares.

    Returns:
        `[N]` int64, the shard of each row.
    """
    dearest_first = torch.argsort(costs, descending=True, stable=True)
    cost = costs[dearest_first].numpy()
    sums = np.zeros(shards, dtype=np.int64)
    dealt = np.empty(len(cost), dtype=np.int64)
    first, last = 0, len(cost)  # of the rows that are left
    while first < last:
        poorest_first = np.argsort(sums, kind="stable")[: last - first]
        poor = int(np.searchsorted(sums[poorest_first], sums[poorest_first[0]] + cost[first], side="right"))
        rich = len(poorest_first) - poor
        rows = np.r_[first : first + poor, last - rich : last]
        sums[poorest_first] += cost[rows]
        dealt[rows] = poorest_first
        first, last = first + poor, last - rich
    shard = torch.empty_like(costs)
    shard[dearest_first] = torch.from_numpy(dealt)
    return shard


def grouped(shard: Tensor, shards: int) -> tuple[Tensor, ...]:
    """For each shard the positions of its rows, ascending.

    Args:
        shard: `[N]` int64, the shard of each row.
        shards: How many there are.
    """
    counts = torch.bincount(shard, minlength=shards).tolist()
    return tuple(torch.argsort(shard, stable=True).split(counts))


def group_partition(groups: Tensor, shards: int) -> tuple[Tensor, ...]:
    """Deal whole groups to shards: consecutive groups, and counts of rows as even as they allow.

    Args:
        groups: `[N]`, the group of each row.
        shards: How many shares.

    Returns:
        For each shard the positions of its rows, by group, then ascending.
    """
    by_group = torch.argsort(groups, stable=True)
    _, sizes = torch.unique_consecutive(groups[by_group], return_counts=True)
    # A group goes where its middle row would go if rows were dealt by count.
    shard_of_group = (2 * sizes.cumsum(0) - sizes) * shards // max(2 * groups.numel(), 1)
    counts = torch.zeros(shards, dtype=torch.int64).index_add_(0, shard_of_group, sizes)
    return tuple(by_group.split(counts.tolist()))


def even_parts(costs: list[int], number: int) -> list[list[int]]:
    """Deal rows, the dearest first, each to the part with the smallest sum so far: even sums, whatever the counts.

    Inside a rank, where parts run one after another, nothing asks for even counts; a part of one dear row and one of
    many cheap rows take the same room, and so fewer parts are needed than `deal` would make.

    Args:
        costs: Cost of each row, at least 0; ties go by the row's number.
        number: Number of parts.

    Returns:
        The rows of each part, ascending.
    """
    poorest: list[tuple[int, int]] = [(0, part) for part in range(number)]
    parts: list[list[int]] = [[] for _ in range(number)]
    for row in sorted(range(len(costs)), key=lambda row: -costs[row]):
        total, part = poorest[0]
        parts[part].append(row)
        heapq.heapreplace(poorest, (total + costs[row], part))
    return [sorted(part) for part in parts]
