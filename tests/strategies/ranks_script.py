"""A script for the launcher's tests, started with two ranks and the name of an event."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment

from rlflow.errors import UserError
from rlflow.process.status import report
from rlflow.strategies.launcher import RankLauncher

HANGS_S = 600


def again() -> None:
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"{int(total)} ranks run again, on port {os.environ['MASTER_PORT']}", flush=True)


def main(happening: str) -> None:
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    print(f"rank {rank} is process {os.getpid()}", flush=True)
    dist.init_process_group("gloo", rank=rank, world_size=2)  # both are there
    dist.barrier()
    time.sleep(1)  # and have left the barrier
    if happening == "rank 1 exits with 3 and rank 0 hangs":
        if rank == 1:
            sys.exit(3)
        time.sleep(HANGS_S)
    elif happening == "rank 1 is killed and rank 0's collective fails":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
    elif happening == "both ranks find a user's error":
        time.sleep(0.5 if rank == 0 else 0.0)
        raise UserError("`stage` is 7")
    elif happening == "rank 0 is killed":
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(HANGS_S)
    elif happening == "rank 1 leaves with code 0 and rank 0 hangs":
        if rank == 1:
            report(rank, "step 2, run rewards")
            os._exit(0)
        time.sleep(HANGS_S)
    elif happening == "rank 1 ends after rank 0" and rank == 1:
        time.sleep(2)
        print("rank 1 is done", flush=True)


if __name__ == "__main__":
    environment = LightningEnvironment()
    RankLauncher(environment, num_processes=2, num_nodes=1).launch(main, sys.argv[1])
    if sys.argv[1] == "both ranks run again":
        RankLauncher(LightningEnvironment(), num_processes=2, num_nodes=1).launch(again)
