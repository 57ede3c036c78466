"""Ranks that find what earlier ranks have left in a store."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store, TCPStore

from rlflow.errors import UserError
from rlflow.strategies.processes import CALL, agree_on_name
from tests.ranks import PATIENCE_S

RANKS, TIMEOUT = 3, timedelta(seconds=20)


def names(store: Store, late: int) -> list[str]:
    """The name that each rank gets; one rank comes later than the others."""

    def of(rank: int) -> str:
        time.sleep(0.3 if rank == late else 0.0)
        return agree_on_name(store, rank, RANKS, TIMEOUT)

    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(of, range(RANKS)))


@pytest.mark.parametrize("late", range(RANKS))
def test_each_attempt_agrees_on_a_new_name_in_a_store_that_was_used_before(late: int) -> None:
    store = HashStore()
    found = [names(store, late) for _ in range(3)]
    assert [len(set(of)) for of in found] == [1, 1, 1]
    assert len({of[0] for of in found}) == 3
    store.set(CALL, "a rank 0 that was killed when it had called")
    assert len({*names(store, late)}) == 1


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(UserError, match=r"rank 1 did not reach .* within `timeout_s`"):
        agree_on_name(HashStore(), 0, 2, timedelta(seconds=0.2))


TWO_ATTEMPTS = """
import os, sys
from datetime import timedelta
import torch.distributed as dist
from rlflow.strategies.processes import join_group

os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
for attempt in range(2):
    ranks = []
    for rank in range(2):
        if not (child := os.fork()):
            join_group("gloo", rank, 2, "127.0.0.1", int(sys.argv[1]), timedelta(seconds=30))
            dist.barrier()
            os._exit(0)  # as a rank that is killed, without a word to the store
        ranks.append(child)
    print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks])
"""


def test_ranks_that_torchrun_starts_again_meet_in_the_store_of_the_ranks_before() -> None:
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ran = subprocess.run(
        [sys.executable, "-c", TWO_ATTEMPTS, str(agent.port)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert ran.stdout == "[0, 0]\n[0, 0]\n", ran.stderr
