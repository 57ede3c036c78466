"""An engine in a process next to some ranks of a gloo job: the others have none, and bring the weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.rollout import (
    Completion,
    EngineSubprocess,
    RankInfo,
    RolloutEngine,
    Sampling,
    TransformersEngine,
    VLLMEngine,
)
from rlflow.rollout.engine_subprocess import free_address
from tests.ranks import RankPool
from tests.rollout.stepping import assert_alike, stepped
from tests.rollout.trained import PROMPTS, STOP, buckets, load, perturb

SEEDS = list(range(len(PROMPTS)))
SAMPLING = Sampling(24, 1.0, STOP)


def _setup(engine: RolloutEngine, folder: Path, rank: int, size: int) -> RolloutEngine:
    engine.setup(str(folder), RankInfo(torch.float32, torch.device("cpu"), rank, size, rank))
    return engine


def _made(kind: str, ranks: int) -> RolloutEngine:
    """An engine for so many ranks; transformers' is for one."""
    return VLLMEngine(ranks, kv_cache_gib=0.25) if kind == "vllm" else TransformersEngine()


def _alone(kind: str, folder: Path, tensor_parallel_size: int) -> list[list[Completion]]:
    """Responses of an engine in the processes of all ranks after each of two syncs; without ranks, in this one."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    engine = _setup(_made(kind, tensor_parallel_size), folder, rank, size)
    model = load(folder)
    completions = []
    for version in range(2):
        perturb(model, version)
        engine.update_weights(buckets(model), version)
        completions.append(engine.generate(PROMPTS, SEEDS, SAMPLING, version))
    engine.close()
    return completions


def _beside(kind: str, folder: Path, owners: list[int]) -> list[list[Completion]]:
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
        _made(kind, len(owners)),
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


@pytest.mark.parametrize("kind", ["transformers", pytest.param("vllm", marks=pytest.mark.slow)])
def test_an_engine_process_of_one_of_two_ranks_answers_as_it_does_alone(
    kind: str, ranks2: RankPool, tied: Path
) -> None:
    nothing, found = ranks2.run(_beside, kind, tied, [1], timeout_s=300)
    assert nothing == []
    for completions, expected in zip(found, _alone(kind, tied, 1), strict=True):
        assert_alike(completions, expected)


@pytest.mark.slow
def test_vllm_in_processes_of_two_of_three_ranks_answers_as_on_two(
    ranks2: RankPool, ranks3: RankPool, tied: Path
) -> None:
    expected, same = ranks2.run(_alone, "vllm", tied, 2, timeout_s=300)
    assert expected == same
    assert ranks3.run(_beside, "vllm", tied, [1, 2], timeout_s=300) == [[], expected, expected]
