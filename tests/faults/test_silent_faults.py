"""Faults that raise no error are caught in the step in which they happen, in float32 and bfloat16, by both engines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from safetensors.torch import save_file

from rlflow.data.prompts import PromptData
from rlflow.models.tiny import write_tiny_model
from rlflow.rollout import TransformersEngine, VLLMEngine
from rlflow.strategies import SingleProcess
from tests.controller.runs import AdapterGRPO, Fit, Result, failing_fit, fit, grpo
from tests.data.list_source import Listed
from tests.families.models import write_family
from tests.faults import planted
from tests.faults.planted import Plant, Planted
from tests.rollout.trained import load, perturb

pytestmark = pytest.mark.row("silent faults")

BEFORE = 3  # steps without the fault
Precision = Literal["fp32", "bf16"]
HERE, BY_VLLM = TransformersEngine, VLLMEngine
OTHER_WEIGHTS = "the rollout engine holds other weights than the trainer, or computes another model"
NOT_HELD = (
    "the engine does not hold the trainer's weights, and would sample from another policy; take another engine, and"
    " report this as a bug"
)
FAULTS: list[tuple[Plant, str, tuple[type[Any], ...]]] = [
    (planted.a_sync_is_skipped, OTHER_WEIGHTS, (HERE, BY_VLLM)),
    (planted.a_tensor_is_left_out, f"{NOT_HELD}. held otherwise: {planted.LEFT_OUT} ", (HERE, BY_VLLM)),
    (planted.the_engine_has_another_temperature, OTHER_WEIGHTS, (HERE, BY_VLLM)),
    (planted.the_prefix_cache_is_stale, OTHER_WEIGHTS, (BY_VLLM,)),
    (planted.positions_are_wrong_after_packing, OTHER_WEIGHTS, (HERE, BY_VLLM)),
    (planted.positions_are_wrong_after_padding, OTHER_WEIGHTS, (HERE,)),
    (planted.the_tied_head_is_not_refreshed, f"{NOT_HELD}. held otherwise: model.embed_tokens.weight ", (BY_VLLM,)),
    (planted.experts_are_not_packed_again, f"{NOT_HELD}. held otherwise: model.layers.0.mlp.experts.", (BY_VLLM,)),
    (planted.an_adapter_is_not_merged, OTHER_WEIGHTS, (HERE, BY_VLLM)),
    (planted.context_is_left_out, OTHER_WEIGHTS, (HERE, BY_VLLM)),
]
CASES = [
    pytest.param(
        plant,
        told,
        engine,
        precision,
        id=f"{plant.__name__}-{engine.__name__}-{precision}",
        marks=() if engine is HERE and precision == "bf16" else pytest.mark.slow,
    )
    for plant, told, engines in FAULTS
    for engine in engines
    for precision in ("fp32", "bf16")
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with weights large enough for responses to depend on their prompts, as in a trained model."""
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=1, intermediate_size=96, max_position=256)
    changed = load(folder)
    perturb(changed, seed=2, scale=0.15)
    weights = {name: weight.detach().contiguous() for name, weight in changed.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("qwen3_moe", tmp_path_factory.mktemp("models") / "experts")


def questions() -> PromptData:
    """Questions of 30 to 70 tokens, two blocks of vLLM's cache at most; the same four again and again."""
    return PromptData(Listed([{"question": "abc 12+7 " * (3 + number) + f"{number}="} for number in range(4)]), None, 4)


@pytest.mark.parametrize(("plant", "told", "engine", "precision"), CASES)
def test_a_fault_that_nothing_fails_by_ends_the_run_in_its_step(
    plant: Plant,
    told: str,
    engine: type[Any],
    precision: Precision,
    model: Path,
    experts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seen: Callable[[str], None],
) -> None:
    start = experts if plant is planted.experts_are_not_packed_again else model
    module = AdapterGRPO(str(start)) if plant is planted.an_adapter_is_not_merged else grpo(start, group_size=8)
    callback = Planted(plant, monkeypatch, after=BEFORE)
    result = run(failing_fit, module, engine, precision, tmp_path, [callback])
    assert len(result.steps) == BEFORE, result.steps
    assert told in result.error
    assert "\n" not in result.error
    seen(f"{plant.__name__.replace('_', ' ')}: caught")


def run(
    how: Callable[[Fit], Result], module: Any, engine: type[Any], precision: Precision, folder: Path, callbacks: Any
) -> Result:
    settings = {"max_steps": BEFORE + 2, "callbacks": callbacks}
    strategy = partial(SingleProcess, precision)
    return how(Fit(module, questions(), folder / "run", strategy, planted.made(engine), settings))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("engine", [HERE, BY_VLLM])
def test_without_a_fault_nothing_is_reported(
    engine: type[Any], precision: Precision, model: Path, tmp_path: Path
) -> None:
    result = run(fit, grpo(model, group_size=8), engine, precision, tmp_path, [])
    assert len(result.steps) == BEFORE + 2
    assert all(abs(step["sync/logprob_spread"] - 1) < 0.01 for step in result.steps)
