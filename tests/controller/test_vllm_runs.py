"""Runs with vLLM, DeepSpeed and FSDP on two ranks: the same twice, and with the trainer's weights at every step."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlflow.rollout.vllm import VLLMEngine
from tests.controller.new_groups import NewGroup, recording
from tests.controller.runs import (
    FSDP,
    ZERO2,
    ZERO3,
    Fit,
    LeavesOneOut,
    Result,
    SkipsASync,
    failing_fit,
    fit,
    grpo,
    sums,
)
from tests.ranks import RankPool
from tests.slow import slow_but
from tests.strategies.strategy_update import Stage

STEPS = 6  # syncs before the first update and after each of five
STRATEGIES = {2: ZERO2, 3: ZERO3, "fsdp": FSDP}
TENSORS = 2 + 2 * 12  # embedding, last norm; per layer two norms, q, k, v with biases, o, gate, up, down


def _run(policy: Path, folder: Path, engine: VLLMEngine, stage: Stage) -> Fit:
    module = grpo(policy, kl_coef=0.1, samples_per_update=6)
    settings = {"max_steps": STEPS, "val_check_interval": 3}
    return Fit(module, sums(12, prompts_per_step=3, held_out=5), folder, STRATEGIES[stage], engine, settings)


def _fit(run: Fit) -> tuple[Result, list[NewGroup]]:
    """A run, and the groups that it formed."""
    with recording() as calls:
        return fit(run), calls


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


Runs = Callable[[int, Stage], list[tuple[Result, list[NewGroup]]]]
Results = Callable[[int, Stage], Result]
SETTINGS: list[tuple[int, Stage]] = [(1, 2), (1, 3), (2, 2), (2, 3), (2, "fsdp")]


@pytest.fixture(scope="module")
def runs(policy: Path, folder: Path, ranks2: RankPool) -> Runs:
    """The results of each rank by tensor-parallel size and strategy; each run is made once."""

    @cache
    def run(tensor_parallel_size: int, stage: Stage) -> list[tuple[Result, list[NewGroup]]]:
        path = folder / f"tp{tensor_parallel_size}-zero{stage}"
        engine = VLLMEngine(tensor_parallel_size, kv_cache_gib=0.25)
        return ranks2.run(_fit, _run(policy, path, engine, stage), timeout_s=200)

    return run


@pytest.fixture(scope="module")
def results(runs: Runs) -> Results:
    """Rank 0's."""
    return lambda *settings: runs(*settings)[0][0]


def _lines(path: Path) -> list[str]:
    """The lines of `metrics.jsonl`, times left out."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [json.dumps({key: value for key, value in line.items() if not key.startswith("time/")}) for line in lines]


@pytest.mark.slow
def test_a_run_logs_the_same_to_the_byte_when_it_is_run_again(
    results: Results, policy: Path, folder: Path, ranks2: RankPool
) -> None:
    results(1, 2)
    ranks2.run(fit, _run(policy, folder / "again", VLLMEngine(kv_cache_gib=0.25), 2), timeout_s=200)
    first, again = (_lines(folder / name / "metrics.jsonl") for name in ("tp1-zero2", "again"))
    assert len(first) == 1 + STEPS  # the first one is of the validation before
    assert first == again
    first_samples, samples = ((folder / name / "samples.jsonl").read_bytes() for name in ("tp1-zero2", "again"))
    assert len(samples.splitlines()) == 4 * STEPS
    assert first_samples == samples


@pytest.mark.parametrize(("tensor_parallel_size", "stage"), slow_but([(2, 2)], SETTINGS))
class TestWeightsInTheEngine:
    def test_vllm_says_what_the_trainer_says_after_every_sync(
        self, results: Results, tensor_parallel_size: int, stage: Stage
    ) -> None:
        gaps = [step["sync/logprob_gap_max"] for step in results(tensor_parallel_size, stage).steps]
        assert len(gaps) == STEPS
        assert max(gaps) < 1e-4

    def test_every_step_syncs_and_verifies_every_tensor(
        self, results: Results, tensor_parallel_size: int, stage: Stage
    ) -> None:
        synced = [step["sync/verified_tensors"] for step in results(tensor_parallel_size, stage).steps]
        assert synced == [TENSORS] * STEPS

    def test_the_saved_model_is_the_trained_one(
        self, results: Results, folder: Path, tensor_parallel_size: int, stage: Stage
    ) -> None:
        trained = results(tensor_parallel_size, stage).weights
        path = folder / f"tp{tensor_parallel_size}-zero{stage}/model"
        saved = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
        assert saved.keys() == trained.keys()
        assert all(torch.equal(saved[name], trained[name]) for name in trained)
        assert AutoTokenizer.from_pretrained(path).decode([49, 43]) == "1+"


@pytest.mark.parametrize(("tensor_parallel_size", "stage"), slow_but([(2, 2)], SETTINGS))
def test_ranks_form_the_same_groups_those_of_vllm_and_deepspeed_included(
    runs: Runs, tensor_parallel_size: int, stage: Stage
) -> None:
    (_, first), (_, second) = runs(tensor_parallel_size, stage)
    assert first == second
    assert len(first) > 2 + 2 * 2  # more than rlflow's own: of each rank, and vLLM's two worlds


def test_a_run_with_shared_engines_moves_rows_to_the_ranks_that_score_them(results: Results) -> None:
    # Both peers of an engine hold all of its rows, so its own values go nowhere, and what single ranks make does.
    assert results(2, 2).steps[0]["exchange/bytes"] > 0


@pytest.mark.slow
def test_shared_engines_generate_as_many_tokens_as_single_ones(results: Results) -> None:
    assert results(2, 2).steps[0]["rollout/tokens"] == results(1, 2).steps[0]["rollout/tokens"]


@pytest.mark.slow
def test_a_sync_that_is_skipped_stops_the_run_in_its_step(policy: Path, tmp_path: Path, ranks2: RankPool) -> None:
    run = _run(policy, tmp_path / "run", SkipsASync(kv_cache_gib=0.25), 2)
    for result in ranks2.run(failing_fit, run, timeout_s=200):
        assert len(result.steps) == 1
        assert result.error.startswith("the engine holds no version, and must generate with version 1")


@pytest.mark.slow
def test_a_sync_that_leaves_one_tensor_out_stops_the_run_in_its_step_and_names_it(
    policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    module = grpo(policy)
    settings = {"max_steps": 3}
    engine = VLLMEngine(kv_cache_gib=0.25)
    run = Fit(module, sums(12, prompts_per_step=3), tmp_path / "run", LeavesOneOut, engine, settings)
    for result in ranks2.run(failing_fit, run, timeout_s=200):
        assert len(result.steps) == 1
        assert "not sent: model.norm.weight" in result.error
