"""One of two ranks that meet and send something: `python -m rlflow.doctor.two_ranks gloo RANK FILE`."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from rlflow.databuffer.transport import Transport

RANKS = 2
TIMEOUT = timedelta(seconds=30)


def main(backend: str, rank: int, store: Path) -> None:
    """Join the other one by a store in a file, gather what both have, and exit with 1 if it is not that."""
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=TIMEOUT)
    mine = torch.full((3,), float(rank + 1), device=device)
    heard = Transport(device, TIMEOUT).all_gather(mine, tuple(range(RANKS)))
    dist.destroy_process_group()
    found = [each.tolist() for each in heard]
    if found != [[1.0] * 3, [2.0] * 3]:
        sys.exit(f"rank {rank} received {found} from both ranks")
    print("met")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
