"""The store by which the ranks of a run find one another, where no launcher serves one."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from rlflow.process.listening import listening
from rlflow.strategies.agent_store import agent_store

LOOPBACK = ("127.0.0.1", "localhost", "::1")
INTERFACES = {"GLOO_SOCKET_IFNAME": "lo"}  # of Linux's loopback


def join_group(backend: str, rank: int, world_size: int, address: str, port: int, timeout: timedelta) -> None:
    """Form the group of all ranks.

    Whoever reaches the store can read and write it, so rank 0 serves it on one interface: that of `address`. On one
    machine that is the loopback, on which gloo's own connections are made too. Under torchrun the agent serves it.

    Args:
        backend: As torch names it.
        rank: Of this process.
        world_size: All ranks.
        address: Of rank 0's machine.
        port: Of the store.
        timeout: Of the group's collectives, and of joining it.
    """
    if dist.is_initialized():
        return
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    store = agent_store(address, port, rank, world_size, timeout)
    if store is None:
        if address in LOOPBACK and os.path.exists("/sys/class/net/lo"):
            for name, interface in INTERFACES.items():
                os.environ.setdefault(name, interface)
        served = listening(address, port) if rank == 0 else None
        descriptor = None if served is None else served.detach()  # the store closes it
        store = TCPStore(address, port, world_size, rank == 0, timeout, master_listen_fd=descriptor)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
