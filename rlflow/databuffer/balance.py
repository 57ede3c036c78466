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

    The decision follows from these constants, never from clocks. So all ranks decide alike, and a run can be repeated.

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

    def costs(self, tokens: Tensor, lengths: Tensor, groups: Tensor) -> Costs:
        """The costs of rows, in tokens of short rows; a row without tokens costs nothing.

        The rows of a group share a prompt, which costs once on each shard that has some of them. Only the lengths of
        prompts are known here, not their tokens. Where the prompts of a group differ, as those of seats do, the
        shortest counts as the shared prompt, so the cost comes out too low.

        Args:
            tokens: `[N]` int64, prompt and response tokens of each row.
            lengths: `[N]` int64, response tokens of each row.
            groups: `[N, ...]` int64, numbers that are equal for the rows of a group.
        """
        group = groups.unique(dim=0, return_inverse=True)[1]
        shortest = np.full(int(group.max()) + 1 if len(group) else 0, np.iinfo(np.int64).max)
        np.minimum.at(shortest, group.numpy(), (tokens - lengths).numpy())
        shared = self._of_row(torch.from_numpy(shortest))
        return Costs(self._of_row(tokens) - shared[group], shared, group)

    def _of_row(self, tokens: Tensor) -> Tensor:
        if self.quadratic == 0:
            return tokens
        return (tokens + self.quadratic * tokens.double().square()).round().long()

    def predict(
        self, tokens: Tensor, costs: Costs, update: Tensor, here: Tensor, there: Tensor, travels: Tensor
    ) -> Predicted:
        """Predict the time that moving rows from the shards `here` to `there` saves, and the time that it takes.

        Args:
            tokens: `[N]` int64, tokens that are sent of each row that moves.
            costs: Costs of the rows.
            update: `[N]`, the mini-batch of each row, from 0; each mini-batch waits for its slowest shard.
            here: `[N]`, the shard of each row if it does not move, from 0.
            there: `[N]`, its shard after the move.
            travels: `[shards]` bool, True where ranks receive the rows of a shard from other ranks even if no row
                changes its shard.
        """
        if tokens.numel() == 0:
            return Predicted()
        shards = len(travels)

        def slowest(shard: Tensor) -> int:
            sums = costs.sums(update * shards + shard, (int(update.max()) + 1) * shards)
            return int(sums.view(-1, shards).max(dim=1).values.sum())

        def arriving(shard: Tensor) -> int:
            """Tokens that the busiest shard receives."""
            comes = travels[shard] | (here != shard)
            return int(tokens.new_zeros(shards).index_add_(0, shard, tokens * comes).max())

        more = max(0, arriving(there) - arriving(here))
        saved = slowest(here) - slowest(there)
        return Predicted(saved / self.tokens_per_s, more * self.bytes_per_token / self.bytes_per_s)


@dataclass(frozen=True)
class Costs:
    """Costs of rows. Each row has a cost of its own; a group has a shared cost, which counts once on each shard.

    Attributes:
        own: `[N]` int64, at least 0, cost of each row by itself.
        shared: `[G]` int64, cost that the rows of each group share.
        group: `[N]` int64, the group of each row, from 0.
    """

    own: Tensor
    shared: Tensor
    group: Tensor

    def take(self, rows: Tensor) -> Costs:
        """The costs of some of the rows."""
        return Costs(self.own[rows], self.shared, self.group[rows])

    def sums(self, place: Tensor, places: int) -> Tensor:
        """`[places]` int64, the cost of all rows at each place.

        Args:
            place: `[N]` int64, the place of each row, from 0.
            places: Number of places.
        """
        of_groups = (place * len(self.shared) + self.group).unique()
        at, group = of_groups // max(1, len(self.shared)), of_groups % max(1, len(self.shared))
        return self.own.new_zeros(places).index_add_(0, place, self.own).index_add_(0, at, self.shared[group])


AUTO = Balance()


@dataclass(frozen=True)
class Predicted:
    """The predicted effect of moving rows, in seconds of one step.

    Attributes:
        gain_s: Time saved in waiting for the slowest shard of each mini-batch; negative where the wait gets longer.
        cost_s: Time to receive rows that would not be sent otherwise, on the rank that receives most.
    """

    gain_s: float = 0.0
    cost_s: float = 0.0

    @property
    def pays(self) -> bool:
        """Whether rows should move."""
        return self.gain_s > self.cost_s

    def __add__(self, other: Predicted) -> Predicted:
        return Predicted(self.gain_s + other.gain_s, self.cost_s + other.cost_s)


def deal(costs: Costs, shards: int) -> Tensor:
    """Deal groups to shards so that the sums of costs are nearly even; a group is cut only where a shard would wait.

    Each group, the costliest first, goes to the shard with the smallest sum so far. Then the shard with the largest sum
    gives rows of a group to the shard with the smallest, about half of the difference. The group's prompt then costs on
    both shards. This is repeated as long as the larger of the two sums falls. In the end two sums differ by at most
    what the costliest row costs alone.

    Args:
        costs: Costs of the rows, in the order of their ids, which breaks ties.
        shards: Number of shards.

    Returns:
        `[N]` int64, the shard of each row.
    """
    own, shared = costs.own.tolist(), costs.shared.tolist()
    members: dict[int, list[int]] = {}
    for row, group in enumerate(costs.group.tolist()):
        members.setdefault(group, []).append(row)
    totals = {group: shared[group] + sum(own[row] for row in rows) for group, rows in members.items()}
    sums = np.zeros(shards, dtype=np.int64)
    held: list[dict[int, list[int]]] = [{} for _ in range(shards)]  # by shard, the rows of each group
    for group in sorted(members, key=lambda group: -totals[group]):
        poorest = int(sums.argmin())
        held[poorest][group] = members[group]
        sums[poorest] += totals[group]
    while shards > 1:
        rich, poor = int(sums.argmax()), int(sums.argmin())
        moves = []  # the larger of the two sums afterwards, the group and its rows that move, and the two sums
        for group in sorted(held[rich]):
            rows, extra = held[rich][group], 0 if group in held[poor] else shared[group]
            for moved in (_about(rows, own, (sums[rich] - sums[poor] - extra) / 2), rows):
                cost = sum(own[row] for row in moved)
                less = cost + (shared[group] if len(moved) == len(rows) else 0)
                left, right = sums[rich] - less, sums[poor] + cost + extra
                moves.append((max(left, right), group, moved, left, right))
        larger, group, moved, left, right = min(moves, key=lambda move: move[0], default=(sums[rich], 0, [], 0, 0))
        if larger >= sums[rich]:
            break
        sums[rich], sums[poor] = left, right
        held[poor].setdefault(group, []).extend(moved)
        stays = sorted({*held[rich].pop(group)}.difference(moved))
        if stays:
            held[rich][group] = stays
    shard = torch.empty_like(costs.own)
    for number, groups in enumerate(held):
        for rows in groups.values():
            shard[rows] = number
    return shard


def _about(rows: list[int], own: list[int], most: float) -> list[int]:
    """The costliest rows that together cost at most `most`; if there are none, the cheapest row that costs anything."""
    found = []
    for row in sorted(rows, key=lambda row: -own[row]):
        if 0 < own[row] <= most:
            found.append(row)
            most -= own[row]
    costly = [row for row in rows if own[row] > 0]
    return found or sorted(costly, key=lambda row: own[row])[:1]


def grouped(shard: Tensor, shards: int) -> tuple[Tensor, ...]:
    """For each shard the positions of its rows, ascending.

    Args:
        shard: `[N]` int64, the shard of each row.
        shards: Number of shards.
    """
    counts = torch.bincount(shard, minlength=shards).tolist()
    return tuple(torch.argsort(shard, stable=True).split(counts))


def group_partition(groups: Tensor, shards: int) -> tuple[Tensor, ...]:
    """Deal whole groups to shards: each shard gets consecutive groups, and nearly the same number of rows.

    Args:
        groups: `[N]`, the group of each row.
        shards: Number of shards.

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
    """Deal rows, the costliest first, each to the part with the smallest sum so far.

    The sums of the parts are nearly even; their numbers of rows need not be, as one costly row may cost as much as many
    cheap ones. Rows share no costs here.

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
