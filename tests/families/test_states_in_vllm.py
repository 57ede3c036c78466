"""vLLM with layers that carry a state, and with experts that a bias chooses: logprobs, syncs, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

import rlflow.rollout.vllm.engine
from rlflow.rollout import Sampling, VLLMEngine, WeightSyncError
from tests.families.states import change, gaps, prompts, reference, weights, write_model
from tests.rollout.trained import setup
from tests.slow import slow_but

LENGTHS = [5, 300, 17, 64, 1, 129, 5, 33]
PROMPTS = prompts(LENGTHS) + prompts(LENGTHS)[:2]  # two of them are shared
SEEDS = list(range(len(PROMPTS)))
SAMPLING = Sampling(16, 1.0, (0,), limits=(3, 16, 7, 16, 16, 2, 9, 16, 16, 16))
IN_PARTS = 256  # tokens of a step, fewer than there are
LIMITS = {"nemotron_h": 1e-5, "falcon_h1": 1e-5, "granitemoehybrid": 2e-5, "glm4_moe": 1e-5}
BF16 = ["nemotron_h", "granitemoehybrid", "glm4_moe"]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., tuple[Any, Any]]]:
    """`engine(name, dtype)`: an engine of the family, and the model that its weights come from."""
    made: list[Any] = []

    def make(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
        folder = write_model(name, tmp_path)
        made.append(
            setup(VLLMEngine(kv_cache_gib=0.25, max_num_batched_tokens=IN_PARTS, max_num_seqs=64), folder, dtype)
        )
        return made[0], reference(folder)

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("name", slow_but(["nemotron_h"], LIMITS))
def test_logprobs_are_of_rows_alone_after_each_sync_and_a_changed_tensor_is_named(
    name: str, engine: Callable[..., tuple[Any, Any]]
) -> None:
    vllm, model = engine(name)
    for version in range(3):
        assert vllm.update_weights([weights(model)], version).tensors == len(weights(model))
        completions = vllm.generate(PROMPTS, SEEDS, SAMPLING, version)
        assert max(gaps(model, PROMPTS, completions)) < LIMITS[name]
        change(model, version)
    assert max(gaps(model, PROMPTS, completions)) > 100 * LIMITS[name]  # weights one update old
    load = vllm._load
    for number, (spoiled, _) in enumerate(weights(model)):

        def load_other(sent: Iterator[tuple[str, Tensor]], spoiled: str = spoiled) -> None:
            load((name, last_changed(tensor) if name == spoiled else tensor) for name, tensor in sent)

        vllm._load = load_other
        with pytest.raises(WeightSyncError, match=rf"held otherwise: {spoiled} \(in "):
            vllm.update_weights([weights(model)], 3 + number)


def last_changed(tensor: Tensor) -> Tensor:
    """`tensor` with another last element."""
    changed = tensor.clone()
    changed.view(-1)[-1] += 1e-3
    return changed


@pytest.mark.slow
@pytest.mark.parametrize("name", BF16)
def test_in_bfloat16_every_tensor_is_read_back_and_the_gap_is_rounding(
    name: str, engine: Callable[..., tuple[Any, Any]]
) -> None:
    vllm, model = engine(name, torch.bfloat16)
    for version in range(2):
        change(model, version)
        vllm.update_weights([weights(model)], version)
    completions = vllm.generate(PROMPTS, SEEDS, SAMPLING, version)
    assert median(gaps(model, PROMPTS, completions)) < 0.1  # against float32, where some rows go to other experts
    change(model, seed=2, scale=0.1)
    assert median(gaps(model, PROMPTS, completions)) > 0.5


@pytest.mark.slow
def test_a_convolution_that_a_reload_left_behind_fails_the_sync(
    engine: Callable[..., tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm, model = engine("nemotron_h", torch.bfloat16)
    monkeypatch.setattr(rlflow.rollout.vllm.engine, "renew_convolutions", lambda model: None)
    with pytest.raises(WeightSyncError, match=r"held otherwise: model\.layers\.0\.mixer\.conv1d\.weight \(in "):
        vllm.update_weights([weights(model)], 0)
