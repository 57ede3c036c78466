"""The pool of processes that other tests use."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, RankPool


def _sum_of_ranks() -> int:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return int(total)


def _raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 does not like it")


def _die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def _sleep() -> None:
    time.sleep(60)


def test_ranks_are_joined_in_one_group(ranks2: RankPool) -> None:
    assert ranks2.run(_sum_of_ranks) == [1, 1]


def test_an_error_names_its_rank_and_the_pool_still_works(ranks2: RankPool) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2.*rank 1 does not like it"):
        ranks2.run(_raise_on_rank_1)
    assert ranks2.run(_sum_of_ranks) == [1, 1]


def test_a_death_names_its_rank_and_exit_code_and_the_next_run_has_new_processes() -> None:
    with RankPool(2) as ranks:
        with pytest.raises(RankError, match="rank 1 of 2: died with exit code 7"):
            ranks.run(_die_on_rank_1)
        assert ranks.run(_sum_of_ranks) == [1, 1]


def test_a_rank_that_hangs_is_killed_at_the_time_limit() -> None:
    with RankPool(1) as ranks:
        ranks.run(dist.get_rank)
        with pytest.raises(RankError, match=r"no answer from ranks \[0\] of 1"):
            ranks.run(_sleep, timeout_s=0.5)
