"""The process groups of this process: of each set of ranks one, whoever uses it, in one run after another.

A group costs threads and sockets under gloo, and buffers on the GPU under NCCL, where two groups of the same ranks
could also wait for one another.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

_Key = tuple[tuple[int, ...], timedelta | None]
_world: ProcessGroup | None = None  # in which the groups were formed
_formed: dict[_Key, ProcessGroup | None] = {}


def process_group(ranks: tuple[int, ...], timeout: timedelta | None) -> ProcessGroup | None:
    """The group of `ranks`; None where this rank is not one of them.

    Called by all ranks of the job in the same order, for groups of one rank too: torch names a group after how many
    calls of `new_group` the process has made before, and engines such as vLLM form groups of all ranks, whose names
    have to be alike on all of them. Groups that their members make alone (`use_local_synchronization`) are named after
    how many groups each member has, and hang where those counts differ. The price is a call of every rank for each
    group, and an object on its members, which connect when they first use it: nothing is split from the group of all
    ranks, which is bound to no device. On the CPU alone gloo connects at once, see `connect_when_used`.

    Args:
        ranks: Ascending.
        timeout: After which a collective of the group fails; None for torch's own.
    """
    global _world
    if _world is not dist.group.WORLD:
        _world = dist.group.WORLD
        _formed.clear()
    if len(ranks) == dist.get_world_size():
        return _world
    if (ranks, timeout) not in _formed:
        group = dist.new_group(list(ranks), timeout=timeout)
        _formed[ranks, timeout] = group if dist.get_rank() in ranks else None
    return _formed[ranks, timeout]


def connect_when_used() -> None:
    """Let gloo's groups connect two ranks when these first exchange something; called before any group is formed.

    Else every rank connects to every other at once, beside NCCL too, where gloo carries small things now and then: of
    1,024 ranks each would open 1,023 sockets, about as many files as a process may have.
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
