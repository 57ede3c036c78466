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

    A collective of all ranks of the job, unless the group is of all ranks or there already; of one rank too, for NCCL
    may split groups from that of all ranks, which all of them have to join. Not left to the first use of each group:
    torch names groups made by their members alone (`use_local_synchronization`) after how many groups each member has,
    and so hangs where the counts differ.

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
