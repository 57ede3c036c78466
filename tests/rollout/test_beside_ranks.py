"""vLLM beside some ranks of a gloo job: the others have none, and bring the weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.rollout import Completion, EnginePlace, EngineSubprocess, RolloutEngine, Sampling, VLLMEngine
from rlflow.rollout.engine_subprocess import free_address
from tests.ranks import RankPool
from tests.rollout.stepping import stepped
from tests.rollout.trained import PROMPTS, STOP, buckets, load, perturb

SEEDS = list(range(len(PROMPTS)))
SAMPLING = Sampling(24, 1.0, STOP)


def _setup(engine: RolloutEngine, folder: Path, rank: int, size: int) -> RolloutEngine:
    engine.setup(str(folder), EnginePlace(torch.float32, torch.device("cpu"), rank, size, rank))
    return engine


def _alone(folder: Path, tensor_parallel_size: int) -> list[list[Completion]]:
    """What an engine in the processes of all ranks generates after each of two syncs; without ranks, in this one."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    engine = _setup(VLLMEngine(tensor_parallel_size, kv_cache_gib=0.25), folder, rank, size)
    model = load(folder)
    completions = []
    for version in range(2):
        perturb(model, version)
        engine.update_weights(buckets(model), version)
        completions.append(engine.generate(PROMPTS, SEEDS, SAMPLING, version))
    engine.close()
    return completions


def _beside(folder: Path, owners: list[int]) -> list[list[Completion]]:
    """The same where only `owners` have an engine, and only rank 0 has the weights; at last prompt by prompt."""
    rank, size, model = dist.get_rank(), dist.get_world_size(), load(folder)
    address = [free_address() if rank == owners[0] else ""]
    dist.broadcast_object_list(address, src=owners[0])
    if rank not in owners:
        for version in range(2):
            perturb(model, version)
            assert len(list(_from_rank_0(model))) == 9
        return []
    engine = EngineSubprocess(
        VLLMEngine(len(owners), kv_cache_gib=0.25),
        index=owners.index(rank),
        size=len(owners),
        address=address[0],
        timeout_s=120.0,
    )
    _setup(engine, folder, rank, size)
    completions = []
    for version in range(2):
        engine.update_weights(_from_rank_0(model), version)
        if version == 0:
            completions.append(engine.generate(PROMPTS, SEEDS, SAMPLING, version))
    completions.append(stepped(engine, SAMPLING, 1))
    engine.close()
    return completions


def _from_rank_0(model: Any) -> Iterator[list[tuple[str, Tensor]]]:
    for bucket in buckets(model):
        for _, tensor in bucket:
            dist.broadcast(tensor.data, src=0)
        yield bucket


def test_vllm_beside_one_of_two_ranks_answers_as_it_does_alone(ranks2: RankPool, tied: Path) -> None:
    expected = _alone(tied, 1)
    assert ranks2.run(_beside, tied, [1], timeout_s=300) == [[], expected]


@pytest.mark.slow
def test_vllm_beside_two_of_three_ranks_answers_as_it_does_on_two(
    ranks2: RankPool, ranks3: RankPool, tied: Path
) -> None:
    expected, same = ranks2.run(_alone, tied, 2, timeout_s=300)
    assert expected == same
    assert ranks3.run(_beside, tied, [1, 2], timeout_s=300) == [[], expected, expected]
