"""Mixtures of experts in vLLM beyond one rank's own process: divided, in a process of its own, in bf16; and refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

import rlflow.rollout.vllm.engine
from rlflow.errors import UserError
from rlflow.models.causal_lm import ScoringModel
from rlflow.rollout import EngineSubprocess, RolloutEngine, VLLMEngine, WeightSyncError
from tests.families.gap import LIMIT, SEEDS, follow_three_syncs, tensors
from tests.families.models import COMMON
from tests.ranks import RankPool
from tests.rollout.test_vllm_ranks import _generate, _syncs_with_one_element_changed
from tests.rollout.trained import check_written, perturb, setup

CPU = torch.device("cpu")
SAME_SEEDS = [SEEDS] * 2
Family = Callable[[str], Path]
slow = pytest.mark.slow
EACH = ["qwen3_moe", pytest.param("mixtral", marks=slow), pytest.param("gpt_oss", marks=slow)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EACH, "glm4_moe"])
def test_two_ranks_that_divide_each_expert_answer_alike(name: str, family: Family, ranks2: RankPool) -> None:
    (first, first_gap, _), (second, second_gap, _) = ranks2.run(_generate, family(name), 2, SAME_SEEDS, timeout_s=300)
    assert max(first_gap, second_gap) < LIMIT
    assert first == second


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_each_rank_reads_back_its_part_of_each_expert(name: str, family: Family, ranks2: RankPool) -> None:
    first, second = ranks2.run(_syncs_with_one_element_changed, family(name), timeout_s=300)
    for tensor in second:
        # The last element is the second rank's, but of a bias that the first rank alone adds.
        added_once = tensor.endswith("experts.down_proj_bias")
        whole = any(word in tensor for word in ("norm", "o_proj.bias", "router", "gate.weight"))
        assert first[tensor].startswith(f"{tensor} (in ") == (added_once or whole)
        assert second[tensor].startswith(f"{tensor} (in ") == (not added_once)


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Any:
    """The engine that the test sets up, to be closed."""
    engines: list[RolloutEngine] = []
    yield lambda made, *given: engines.append(setup(made, *given)) or engines[-1]
    for made in engines:
        made.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "qwen3_5", "granitemoehybrid"])
def test_an_engine_in_a_process_of_its_own_follows_each_sync(name: str, family: Family, engine: Any) -> None:
    folder = family(name)
    model = ScoringModel.load(folder, torch.float32, CPU)
    beside = EngineSubprocess(VLLMEngine(kv_cache_gib=0.25), index=0, size=1, address="", timeout_s=120.0)
    follow_three_syncs(engine(beside, folder), model)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=slow)])
def test_experts_that_are_not_packed_again_fail_the_sync(
    dtype: torch.dtype, name: str, family: Family, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = family(name)
    model = ScoringModel.load(folder, dtype, CPU)
    vllm = engine(VLLMEngine(kv_cache_gib=0.25), folder, dtype)
    assert vllm.update_weights([tensors(model)], 0).tensors == len(tensors(model))
    perturb(model, 0)
    monkeypatch.setattr(rlflow.rollout.vllm.engine, "pack_again", lambda model: None)
    with pytest.raises(WeightSyncError) as stale:
        vllm.update_weights([tensors(model)], 1)
    packed = [f"model.layers.{layer}.mlp.experts.{kind} " for layer in (0, 1) for kind in ("gate_up_proj", "down_proj")]
    assert [kind in str(stale.value) for kind in packed] == [True] * 4
    others = str(stale.value).count(" (in ") - str(stale.value).count("experts.routed_experts.w")
    assert others == 0
    monkeypatch.undo()
    vllm.update_weights([tensors(model)], 2)
    check_written(vllm, tensors(model))


REFUSED = {
    "Qwen2MoeConfig": (1, {"num_experts": 4}, r"a mixture of experts \(num_experts 4\), whose weights it cannot read"),
    "MixtralConfig": (1, {"intermediate_size": 80}, r"has experts whose size on each rank is 80; on the CPU vLLM pads"),
    "Qwen3MoeConfig": (4, {"moe_intermediate_size": 64}, r"has experts whose size on each rank is 16; on the CPU vLLM"),
    "GptOssConfig": (
        1,
        {"intermediate_size": 64, "layer_types": ["full_attention", "sliding_attention"]},
        "has other `layer_types` than sliding and full attention in turn",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_experts_that_cannot_be_read_back_are_refused_by_their_configuration(kind: str, tmp_path: Path) -> None:
    ranks, settings, told = REFUSED[kind]
    getattr(transformers, kind)(**COMMON | settings).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=rf"^`rollout` is VLLMEngine, and the model, of the type '\w+', (is )?{told}"):
        VLLMEngine(ranks).check_model(AutoConfig.from_pretrained(tmp_path))
