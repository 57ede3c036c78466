"""Bringing together what the peers of a divided line have computed, differentiably."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rlflow.models.packing import Peers


def peers_of(group: ProcessGroup) -> Peers:
    """The ranks of a group as a model's peers."""
    return Peers(dist.get_world_size(group), dist.get_rank(group), partial(_gather, group))


def _gather(group: ProcessGroup, values: tuple[Tensor, ...], counts: list[int]) -> tuple[Tensor, ...]:
    apply: Any = _Gather.apply
    whole: Tensor = apply(torch.stack(values), counts, group)
    return whole.unbind()


class _Gather(torch.autograd.Function):
    """`[K, r]` of each peer to `[K, R]` on all; its own part of the gradient back to each.

    The peers go on from the same numbers to the same loss, so each has the whole gradient at hand: nothing is summed.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, counts: list[int], group: ProcessGroup) -> Tensor:
        ctx.start, ctx.length = sum(counts[: dist.get_rank(group)]), part.shape[1]
        if max(counts) == 0:
            return part.clone()
        mine = torch.nn.functional.pad(part, (0, max(counts) - part.shape[1]))
        gathered = [torch.empty_like(mine) for _ in counts]
        dist.all_gather(gathered, mine, group)
        return torch.cat([values[:, :count] for values, count in zip(gathered, counts, strict=True)], 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].narrow(1, ctx.start, ctx.length), None, None
