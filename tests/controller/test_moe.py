"""Runs with a mixture of experts: balanced, and with the experts that the engine chose, at any number of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlflow import Environment
from rlflow.controller.gap import LARGEST_GAP
from rlflow.models.moe import MoE
from rlflow.models.optimizer import Optimizer
from rlflow.rollout import VLLMEngine
from rlflow.settings import Place
from tests.controller.runs import FSDP, ZERO2, ZERO3, Fit, Result, failing_fit, fit, grpo, sums
from tests.controller.test_ranks import difference
from tests.families.models import write_family
from tests.ranks import RankPool

FLOAT32 = 1e-6
REPLAYED = MoE(router_aux_loss_coef=0.5, routing_replay=True)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("qwen3_moe", tmp_path_factory.mktemp("models") / "experts")


def run(model: Path, folder: Path, moe: MoE | None, strategy: Any = None, **settings: Any) -> Fit:
    """Two steps of two updates each."""
    module = grpo(model, moe=moe, samples_per_update=6, optimizer=Optimizer("sgd", lr=0.02, gradient_clipping=0.0))
    given = {} if strategy is None else {"strategy": strategy}
    return Fit(module, sums(6, 3), folder, settings={"max_steps": 2, **settings}, **given)


def numbers(result: Result, name: str) -> list[float]:
    return [step[name] for step in result.steps]


@pytest.fixture(scope="module")
def alone(experts: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return fit(run(experts, tmp_path_factory.mktemp("alone"), REPLAYED))


def test_a_run_replays_the_experts_of_each_token_and_balances_their_load(
    alone: Result, experts: Path, tmp_path: Path
) -> None:
    assert max(numbers(alone, LARGEST_GAP)) < 1e-5  # as each token has its own experts
    assert 0 < numbers(alone, "actor/routed_otherwise")[0] < 0.2  # of the second update, after the first
    assert all(0.5 < loss < 0.5 * 4 for loss in numbers(alone, "actor/router_aux_loss"))  # coef times 1 to E/k
    unbalanced = fit(run(experts, tmp_path, MoE(routing_replay=True)))
    assert difference(unbalanced.weights, alone.weights) > 100 * FLOAT32
    assert "actor/router_aux_loss" not in unbalanced.steps[0]


TOGETHER: dict[str, Any] = {}
APART = {"placement": {"rollout": 0, "actor": 1}}  # every rollout is sent, with its experts


@pytest.mark.parametrize(
    ("strategy", "placement"),
    [
        pytest.param(ZERO2, TOGETHER, id="zero2"),
        pytest.param(ZERO3, TOGETHER, id="zero3", marks=pytest.mark.slow),
        pytest.param(ZERO2, APART, id="apart"),
    ],
)
def test_losses_and_weights_at_two_ranks_are_those_of_one(
    strategy: Any, placement: Any, alone: Result, experts: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    results = ranks2.run(fit, run(experts, tmp_path, REPLAYED, strategy, **placement), timeout_s=200)
    for result in results:
        for name in ("actor/router_aux_loss", "actor/routed_otherwise", "actor/loss"):
            assert numbers(result, name) == pytest.approx(numbers(alone, name), rel=1e-4, abs=1e-6)
        assert not result.weights or difference(result.weights, alone.weights) < FLOAT32
    assert results[1].weights


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "parallel"), [(ZERO2, 1), (ZERO3, 2), (FSDP, 1)])
def test_vllm_follows_a_mixture_that_is_trained(
    strategy: Any, parallel: int, experts: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    given = run(experts, tmp_path, MoE(router_aux_loss_coef=0.5), strategy)
    engine = VLLMEngine(parallel, kv_cache_gib=0.25)
    for result in ranks2.run(fit, replace(given, engine=engine), timeout_s=400):
        assert max(numbers(result, LARGEST_GAP)) < 1e-5
        assert numbers(result, "sync/verified_tensors") == [25.0, 25.0]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layers"), [("qwen3_moe", 2), ("mixtral", 2), ("gpt_oss", 1)])
@pytest.mark.parametrize("parallel", [1, 2])
def test_vllm_follows_a_mixture_whose_layers_and_experts_ranks_divide(
    parallel: int, family: str, layers: int, tmp_path: Path, ranks2: RankPool
) -> None:
    model = write_family(family, tmp_path / family)
    given = run(model, tmp_path / "run", MoE(router_aux_loss_coef=0.5), FSDP, max_steps=5)
    given = replace(given, engine=VLLMEngine(parallel, kv_cache_gib=0.25))
    divided = given.settings | {"placement": {"actor": Place(tensor_parallel_size=layers, expert_parallel_size=2)}}
    whole, found = (ranks2.run(fit, each, timeout_s=500) for each in (given, replace(given, settings=divided)))
    weights = next(result.weights for result in whole if result.weights)
    for result in found:
        assert max(numbers(result, LARGEST_GAP)) < 1e-5
        assert numbers(result, "sync/verified_tensors") == [float(len(weights))] * 5
        assert numbers(result, "actor/loss") == pytest.approx(numbers(whole[0], "actor/loss"), rel=1e-4, abs=1e-6)
        assert not result.weights or difference(result.weights, weights) < FLOAT32


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"engine": VLLMEngine()}, "`rollout` is VLLMEngine, which does not report which experts it chose"),
        ({"settings": {"partial_rollout": 4}}, "`moe.routing_replay` and `trainer.partial_rollout` are set"),
    ],
)
def test_replay_that_cannot_be_is_refused_before_the_run(
    settings: dict[str, Any], told: str, experts: Path, tmp_path: Path
) -> None:
    module = grpo(experts, moe=MoE(routing_replay=True))
    assert told in failing_fit(Fit(module, sums(6, 3), tmp_path, **settings)).error


def test_replay_in_conversations_is_refused_before_the_run_in_one_line(experts: Path, tmp_path: Path) -> None:
    module = grpo(experts, moe=MoE(routing_replay=True))
    module.environment = Environment("tests.controller.answering.Counting")
    data = sums(6, 3)
    data.chat_template, data.max_prompt_length = True, 120
    error = failing_fit(Fit(module, data, tmp_path)).error
    assert "`moe.routing_replay` is set for `actor` and `module.environment` is set; the experts of a" in error
    assert "\n" not in error.strip()
