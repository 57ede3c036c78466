"""Sequence parallelism by Ulysses (Jacobs et al., arXiv 2309.14509): ranks divide a packed line among them.

Each rank computes a part of the line. In attention it computes a share of the heads, over the whole line. The two
functions here are differentiable: attention over a divided line, and the gathering of results.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rlflow.models.attention import Attention, packed_attention
from rlflow.models.packing import Peers


def peers_of(group: ProcessGroup) -> Peers:
    """The ranks of a group as a model's peers."""
    return Peers(dist.get_world_size(group), dist.get_rank(group), partial(_gather, group))


def divided_attention(group: ProcessGroup) -> Attention:
    """`packed_attention` over a line that the ranks of a group divide in parts of equal length.

    Heads are divided among the ranks. If there are fewer heads of keys and values than ranks, some ranks have the same.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
    ) -> tuple[Tensor, None]:
        copies = max(1, size // key.shape[1])
        key, value = (states.repeat_interleave(copies, 1) for states in (key, value))
        query, key, value = (_whole_line(states, group, size) for states in (query, key, value))
        output, _ = packed_attention(module, query, key, value, attention_mask, share=rank, **settings)
        return _own_part(output, group, size), None

    return attention


def _whole_line(states: Tensor, group: ProcessGroup, size: int) -> Tensor:
    """`[1, heads, l, D]` of this part of the line to `[1, heads / size, size * l, D]` of the whole line."""
    _, heads, length, width = states.shape
    by_rank = states.view(size, heads // size, length, width).transpose(1, 2)  # the heads of each rank
    by_part = _exchange(by_rank, group)  # the states of each part of the line
    return by_part.reshape(size * length, heads // size, width).transpose(0, 1)[None]


def _own_part(output: Tensor, group: ProcessGroup, size: int) -> Tensor:
    """`[1, size * l, heads / size, D]` of the whole line to `[1, l, heads, D]` of this part of it."""
    _, length, heads, width = output.shape
    by_part = output.view(size, length // size, heads, width)
    by_rank = _exchange(by_part, group)  # the heads of each rank
    return by_rank.transpose(0, 1).reshape(1, length // size, size * heads, width)


def _exchange(values: Tensor, group: ProcessGroup) -> Tensor:
    """Send `values[i]` to rank i; place i of the result has what rank i sends to this rank."""
    apply: Any = _Exchange.apply
    received: Tensor = apply(values, group)
    return received


class _Exchange(torch.autograd.Function):
    """Sends the gradient of received values back to their sender."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        sent = values.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exchange(grads[0], ctx.group), None


def _gather(group: ProcessGroup, values: tuple[Tensor, ...], counts: list[int]) -> tuple[Tensor, ...]:
    """Gather the values of all peers, with one exchange for all values of a dtype."""
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(value.dtype for value in values):
        places = [place for place, value in enumerate(values) if value.dtype == dtype]
        flat = [values[place].flatten(1) if values[place].dim() > 1 else values[place][:, None] for place in places]
        whole = _gather_lines(torch.cat(flat, 1).T, counts, group)
        widths = [part.shape[1] for part in flat]
        for place, part in zip(places, whole.split(widths), strict=True):
            found[place] = part.T.reshape(-1, *values[place].shape[1:])
    return tuple(found[place] for place in range(len(values)))


def _gather_lines(part: Tensor, counts: list[int], group: ProcessGroup) -> Tensor:
    """`[K, r]` of each peer to `[K, R]` on all peers; in the backward pass each peer takes its part of the gradient.

    The peers compute the same loss from the same numbers, so each has the whole gradient, and nothing is summed.
    """
    if max(counts) == 0:
        return part
    sent = torch.nn.functional.pad(part.detach(), (0, max(counts) - part.shape[1])).contiguous()
    gathered = [torch.empty_like(sent) for _ in counts]
    dist.all_gather(gathered, sent, group)
    parts = [values[:, :count] for values, count in zip(gathered, counts, strict=True)]
    parts[dist.get_rank(group)] = part
    return torch.cat(parts, 1)
