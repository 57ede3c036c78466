"""Prints the sockets that a rank of a gloo group holds open: python tests/data/connections.py RANKS [when-used]"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing

from rlflow.data.process_groups import connect_when_used


def rank(index: int, ranks: int, port: int) -> None:
    """Join the group, reduce a number over all ranks, and print what rank 0 then holds."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=index, world_size=ranks)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == ranks
    if index == 0:
        print(sum(is_socket(number) for number in os.listdir("/proc/self/fd")))
    dist.barrier()
    dist.destroy_process_group()


def is_socket(number: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{number}").startswith("socket")
    except FileNotFoundError:  # that of the listing itself
        return False


if __name__ == "__main__":
    size = int(sys.argv[1])
    if "when-used" in sys.argv:
        connect_when_used()
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.start_processes(rank, (size, meeting.port), size, start_method="fork")
