"""vLLM with layers that carry a state, and with experts that a bias chooses: logprobs, syncs, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

import rlflow.rollout.vllm.engine
from rlflow.errors import UserError
from rlflow.rollout import Sampling, VLLMEngine, WeightSyncError
from rlflow.rollout.vllm.delta_rule import gated_delta_rule
from tests.families.states import change, gaps, prompts, reference, weights, write_model
from tests.rollout.trained import setup
from tests.slow import slow_but

LENGTHS = [5, 300, 17, 64, 1, 129, 5, 33]
PROMPTS = prompts(LENGTHS) + prompts(LENGTHS)[:2]  # two of them are shared
SEEDS = list(range(len(PROMPTS)))
SAMPLING = Sampling(16, 1.0, (0,), limits=(3, 16, 7, 16, 16, 2, 9, 16, 16, 16))
IN_PARTS = 256  # tokens of a step, fewer than there are
LIMITS = {
    "nemotron_h": 1e-5,
    "falcon_h1": 1e-5,
    "granitemoehybrid": 2e-5,
    "glm4_moe": 1e-5,
    "qwen3_5": 1e-5,
    "qwen3_5_moe": 1e-5,
    "qwen3_next": 1e-5,
}
# Settings in addition to the family's: Nemotron-H without experts, which vLLM has on GPUs alone.
DENSE = {"nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"]}}
KERNEL_HEADS = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}  # that vLLM's own delta rule takes
BF16: dict[str, dict[str, int]] = {
    "nemotron_h": {},
    "granitemoehybrid": {},
    "glm4_moe": {},
    "qwen3_5": KERNEL_HEADS,
    "qwen3_next": KERNEL_HEADS,
}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., tuple[Any, Any]]]:
    """`engine(name, dtype)`: an engine of the family, and the model that its weights come from."""
    made: list[Any] = []

    def make(name: str, dtype: torch.dtype = torch.float32, **settings: int) -> tuple[Any, Any]:
        folder = write_model(name, tmp_path, **DENSE.get(name, {}), **settings)
        VLLMEngine().check_model(AutoConfig.from_pretrained(folder))
        made.append(
            setup(VLLMEngine(kv_cache_gib=0.25, max_num_batched_tokens=IN_PARTS, max_num_seqs=64), folder, dtype)
        )
        return made[0], reference(folder)

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("name", slow_but(["qwen3_5"], LIMITS))
def test_logprobs_are_of_rows_alone_after_each_sync_and_a_changed_tensor_is_named(
    name: str, engine: Callable[..., tuple[Any, Any]]
) -> None:
    vllm, model = engine(name)
    for version in range(5):
        assert vllm.update_weights([weights(model)], version).tensors == len(weights(model))
        completions = vllm.generate(PROMPTS, SEEDS, SAMPLING, version)
        assert max(gaps(model, PROMPTS, completions)) < LIMITS[name]
        turns = [[*prompt, *each.token_ids, 65] for prompt, each in zip(PROMPTS, completions, strict=True)]
        assert max(gaps(model, turns, vllm.generate(turns, SEEDS, SAMPLING, version))) < LIMITS[name]  # a next turn
        change(model, version)
        assert max(gaps(model, PROMPTS, completions)) > 100 * LIMITS[name]  # the engine is one update old
    load = vllm._load
    for number, (spoiled, _) in enumerate(weights(model)):

        def load_other(sent: Iterator[tuple[str, Tensor]], spoiled: str = spoiled) -> None:
            load((name, last_changed(tensor) if name == spoiled else tensor) for name, tensor in sent)

        vllm._load = load_other
        with pytest.raises(WeightSyncError, match=rf"held otherwise: {spoiled} \(in "):
            vllm.update_weights([weights(model)], 5 + number)


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
    vllm, model = engine(name, torch.bfloat16, **BF16[name])
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


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 32), (torch.float16, 64)])
def test_a_delta_rule_that_nothing_computes_on_the_cpu_is_refused(
    dtype: torch.dtype, size: int, engine: Callable[..., tuple[Any, Any]]
) -> None:
    heads = {"linear_key_head_dim": size, "linear_value_head_dim": size}
    with pytest.raises(
        UserError, match=rf"in bf16 for heads of the size 64 or 128; here it is {dtype} and the size {size}"
    ):
        engine("qwen3_5", dtype, **heads)


def test_the_delta_rule_is_the_paper_s() -> None:
    """One head of the size 1, whose keys and queries of norm 1 are 1 or -1; worked out by hand."""
    one = torch.tensor([1.0, 1.0])[None, :, None, None]
    keys, values = torch.tensor([1.0, -1.0])[None, :, None, None], torch.tensor([2.0, 4.0])[None, :, None, None]
    decays, strengths = torch.tensor([0.0, math.log(0.5)])[None, :, None], torch.tensor([0.5, 0.5])[None, :, None]
    read, state = gated_delta_rule(one, keys, values, decays, strengths, torch.zeros(1, 1, 1, 1))
    # S_1 = 0.5 * 2 = 1. S_2 = 0.5 (1 - 0.5) - 0.5 * 4 = -1.75.
    assert read.flatten().tolist() == pytest.approx([1.0, -1.75], abs=1e-5)
    assert state.item() == pytest.approx(-1.75, abs=1e-5)
