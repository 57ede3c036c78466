"""Process groups are formed by all ranks alike: NCCL may form each by a collective of all of them, and would hang."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlflow.callbacks.hooks import Callbacks
from rlflow.controller.run import Run
from rlflow.process.environment_variables import place_kept
from rlflow.rollout.transformers import TransformersEngine
from rlflow.rollout.vllm import VLLMEngine
from rlflow.run.setup import join
from rlflow.settings import Place
from rlflow.strategies import DeepSpeedStrategy
from tests.controller.new_groups import recording
from tests.controller.runs import ZERO2, ZERO3, Fit, fit, grpo, sums, trainer_of
from tests.ranks import RankPool
from tests.slow import slow_but

# Numbers of ranks, tensor-parallel size, placement, steps ahead
MEETINGS: dict[str, tuple[int, int, dict[str, Any], int]] = {
    "one place, an engine for each rank": (4, 1, {}, 0),
    "one place, engines of two ranks": (4, 2, {}, 0),
    "one place, two ranks to a sequence": (4, 1, {"actor": Place(sequence_parallel_size=2)}, 0),
    "an engine beside one rank": (3, 1, {"rollout": 0, "actor": "1-2", "reference": "1-2"}, 0),
    "an engine of two ranks apart": (3, 2, {"rollout": "0-1", "actor": 2, "reference": 2}, 0),
    "engines of two ranks apart": (8, 2, {"rollout": "0-3", "actor": "4-7", "reference": "4-7"}, 0),
    "engines and sequences of two ranks apart, one step ahead": (
        8,
        2,
        {"rollout": "0-3", "actor": Place("4-7", sequence_parallel_size=2), "reference": "4-5"},
        1,
    ),
}


@pytest.fixture(scope="module")
def ranks8() -> Iterator[RankPool]:
    with RankPool(8) as ranks:
        yield ranks


def _meet(run: Fit) -> list[Any]:
    """The groups that this rank forms until models are loaded."""
    trainer = trainer_of(run, run.strategy(), [])

    def meet(run: Run, callbacks: Callbacks) -> dict[str, Any]:
        join(run, None)
        run.rank_engines.close()
        return {}

    with recording() as calls:
        trainer._launch(run.module, run.data, trainer.settings, meet)
    return calls


def _fit(run: Fit) -> list[Any]:
    """The groups that this rank forms in a whole run."""
    with recording() as calls:
        fit(run)
    return calls


class NeverBuilt(VLLMEngine):
    """Placed as vLLM is: in all ranks' processes, or in processes of its own."""

    def close(self) -> None: ...


@pytest.mark.parametrize("name", slow_but([*MEETINGS][::3], MEETINGS))
def test_ranks_that_meet_form_the_same_groups_in_the_same_order(
    name: str, policy: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    world_size, tensor_parallel_size, placement, max_staleness = MEETINGS[name]
    settings = {"placement": placement, "max_staleness": max_staleness}
    module = grpo(policy, kl_coef=0.1)
    run = Fit(module, sums(16, 8), tmp_path / "run", ZERO2, NeverBuilt(tensor_parallel_size), settings)
    ranks: RankPool = request.getfixturevalue(f"ranks{world_size}")
    first, *others = ranks.run(_meet, run)
    assert len(first) >= world_size  # each rank's own, at the least
    assert all(calls == first for calls in others)
    assert not any(local for _, local in first)  # by all ranks, not by members alone


@pytest.mark.parametrize("sequence_parallel_size", [1, 2])
def test_a_run_at_zero_3_forms_no_group_that_some_ranks_do_not(
    sequence_parallel_size: int, policy: Path, tmp_path: Path, ranks3: RankPool
) -> None:
    actor = Place("1-2", sequence_parallel_size=sequence_parallel_size)
    settings = {"placement": {"rollout": 0, "actor": actor, "reference": 1}}
    run = Fit(grpo(policy, kl_coef=0.1), sums(16, 4), tmp_path / "run", ZERO3, TransformersEngine(), settings)
    first, *others = ranks3.run(_fit, run)
    assert first
    assert others == [first, first]


def test_the_process_group_is_bound_to_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **settings: given.update(settings, backend=backend))
    strategy = DeepSpeedStrategy()
    strategy.processes.parallel_devices = [torch.device("cuda", 0)]
    strategy.processes.cluster_environment = OfOne()
    with place_kept():
        strategy.processes.join()
    assert given["backend"] == "cpu:gloo,cuda:nccl"
    assert given.get("device_id") is None


def test_a_barrier_names_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(dist, "barrier", lambda **settings: given.append(settings))
    strategy = DeepSpeedStrategy()
    strategy.processes.parallel_devices = [torch.device("cuda", 0)]
    strategy.processes.cluster_environment = OfOne()
    strategy.barrier()
    assert given == [{"device_ids": [0]}]


class OfOne:
    """A cluster of one process."""

    main_address, main_port = "127.0.0.1", 0  # the system chooses

    def world_size(self) -> int:
        return 1

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0
