"""Ranks that find what earlier ranks have left in a store."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store

from rlflow.errors import UserError
from rlflow.strategies.processes import CALL, agree_on_name

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
