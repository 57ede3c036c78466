"""Even shares of rows: equal counts, and costs as even as a greedy deal makes them."""

from __future__ import annotations

import torch
from torch import Tensor


def balanced_partition(costs: Tensor, ids: Tensor, shards: int) -> tuple[Tensor, ...]:
    """Deal rows to shards so that counts differ by at most one and sums of costs are nearly even.

    Rows are dealt in rounds of one row a shard, the dearest rows first; in each round the shard with the smallest
    sum gets the dearest row. Two sums never differ by more than the dearest row: a round adds to a difference at most
    what lies between its own dearest and cheapest row, and takes away from the larger sum first.

    Args:
        costs: `[N]`, at least 0, usually tokens.
        ids: `[N]`, distinct; break ties, so that all ranks deal alike.
        shards: How many shares.

    Returns:
        For each shard the positions of its rows, ascending.
    """
    cost, name = costs.tolist(), ids.tolist()
    dearest_first = sorted(range(len(cost)), key=lambda row: (-cost[row], name[row]))
    sums = [0] * shards
    rows: list[list[int]] = [[] for _ in range(shards)]
    for start in range(0, len(cost), shards):
        poorest_first = sorted(range(shards), key=sums.__getitem__)
        for shard, row in zip(poorest_first, dearest_first[start : start + shards], strict=False):
            sums[shard] += cost[row]
            rows[shard].append(row)
    return tuple(torch.tensor(sorted(share), dtype=torch.int64) for share in rows)


def group_partition(groups: Tensor, shards: int) -> tuple[Tensor, ...]:
    """Deal whole groups to shards: consecutive groups, and counts of rows as even as they allow.

    Args:
        groups: `[N]`, the group of each row.
        shards: How many shares.

    Returns:
        For each shard the positions of its rows, by group, then ascending.
    """
    _, member, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    # A group goes where its middle row would go if rows were dealt by count.
    shard_of_group = (2 * sizes.cumsum(0) - sizes) * shards // max(2 * groups.numel(), 1)
    by_group = torch.argsort(member, stable=True)
    shard_of_row = shard_of_group[member[by_group]]
    return tuple(by_group[shard_of_row == shard] for shard in range(shards))


def pays(
    costs: Tensor,
    update: Tensor,
    here: Tensor,
    there: Tensor,
    *,
    tokens_per_s: float = 10_000.0,
    bytes_per_s: float = 1e9,
    bytes_per_token: float = 64.0,
) -> bool:
    """Whether moving rows from the shards `here` to `there` is predicted to save more time than it takes.

    Decided from constants, never from clocks, so that all ranks decide alike and a run can be repeated.

    Args:
        costs: `[N]` int64 tokens.
        update: `[N]`, the mini-batch of each row, from 0; each waits for its slowest shard.
        here: `[N]`, the shard of each row now, from 0.
        there: `[N]`, its shard after the move.
        tokens_per_s: What one rank trains on. The default is near a 7B model's on a large GPU; for a smaller model
            imbalance costs less, and rows move a little too readily.
        bytes_per_s: What one rank receives.
        bytes_per_token: Of all values of a row together: ids, masks, and the log-probabilities of three policies.
    """
    if costs.numel() == 0:
        return False
    shards = int(torch.maximum(here, there).max()) + 1

    def slowest(shard: Tensor) -> int:
        sums = costs.new_zeros((int(update.max()) + 1) * shards).index_add_(0, update * shards + shard, costs)
        return int(sums.view(-1, shards).max(dim=1).values.sum())

    arriving = int(costs.new_zeros(shards).index_add_(0, there, costs * (here != there)).max())
    saved_s = (slowest(here) - slowest(there)) / tokens_per_s
    return saved_s > arriving * bytes_per_token / bytes_per_s
