"""Which rows of one level are below which of another, and where they lie beside them."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.databuffer.partition import Partition


def ancestors(above: Tensor, below: Tensor) -> Tensor:
    """For each row below, the position of the row above that it descends from; -1 where that is none of them.

    Args:
        above: Paths `[N, depth]`, in order and distinct.
        below: Paths `[M, more]`, in any order.
    """
    depth = above.shape[1]
    wanted = below[:, :depth].contiguous()
    mine, theirs = above[:, 0].contiguous(), wanted[:, 0].contiguous()
    if depth > 1:
        numbered = torch.unique(torch.cat([above, wanted]), dim=0, return_inverse=True)[1]
        mine, theirs = numbered[: len(above)].contiguous(), numbered[len(above) :].contiguous()
    positions = torch.searchsorted(mine, theirs)
    if not len(above):
        return torch.full_like(positions, -1)
    positions = positions.clamp_(max=len(above) - 1)
    return positions.where(mine[positions] == theirs, -1)


def beside_parents(parents: Tensor, read: Partition) -> Partition:
    """Where rows lie that are read beside those they descend from: by the order of these, then their own.

    Args:
        parents: `[M]`, the position of each row's ancestor.
        read: How the ancestors lie.
    """
    shard, place = (each.long()[parents] for each in read.places)
    order = torch.argsort(place, stable=True)
    order = order[torch.argsort(shard[order], stable=True)]
    counts = torch.bincount(shard, minlength=len(read.shards)).tolist()
    return Partition(tuple(order.split(counts)))
