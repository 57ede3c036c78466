"""Prints the sockets that a rank of a gloo group holds: python tests/databuffer/connections.py RANKS [when-used]

The ranks are threads of one process, which nothing has to be forked for.
"""

from __future__ import annotations

import datetime
import os
import sys
import threading

import torch
import torch.distributed as dist

from rlflow.databuffer.transport import connect_when_used

TIMEOUT = datetime.timedelta(seconds=60)


def sockets() -> int:
    """Those that this process holds."""
    return sum(is_socket(number) for number in os.listdir("/proc/self/fd"))


def is_socket(number: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{number}").startswith("socket")
    except FileNotFoundError:  # that of the listing itself
        return False


if __name__ == "__main__":
    ranks = int(sys.argv[1])
    os.environ.pop("TORCH_GLOO_LAZY_INIT", None)  # a run in the process that starts this one sets it
    if "when-used" in sys.argv:
        connect_when_used()
    store, groups = dist.HashStore(), {}

    def join(rank: int) -> None:
        """Join the group, and reduce a number over all ranks."""
        groups[rank] = dist.ProcessGroupGloo(store, rank, ranks, TIMEOUT)
        total = torch.ones(1)
        groups[rank].allreduce([total]).wait()
        assert total == ranks

    before = sockets()
    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(groups) == ranks
    print((sockets() - before) // ranks, flush=True)
    # Closing a group while those of its peers are open in the same process may abort it ("terminate called without an
    # active exception", in 1 run of 25). No rank has peers in its own process, so nothing is closed here.
    os._exit(0)
