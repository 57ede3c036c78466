"""Mixtures of experts in vLLM beyond one rank's own process: divided, in a process of its own, in bf16; and refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig

import rlflow.rollout.vllm.engine
from rlflow.errors import UserError
from rlflow.models.causal_lm import ScoringModel
from rlflow.rollout import EngineSubprocess, RolloutEngine, VLLMEngine, WeightSyncError
from rlflow.rollout.vllm.weights import pieces_of_experts
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


class Experts(nn.Module):
    """As vLLM's layer of experts is on one of two ranks: 4 experts of the size 6, of a model of the width 5."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.w13_weight, self.w2_weight = (nn.Parameter(torch.zeros(4, *of)) for of in ((6, 5), (5, 3)))
        self.w13_bias, self.w2_bias = (nn.Parameter(torch.zeros(4, size)) for size in (6, 5))
        self.moe_config = SimpleNamespace(moe_parallel_config=SimpleNamespace(tp_size=2, tp_rank=rank))


def test_pieces_of_two_ranks_are_each_element_of_each_expert_once() -> None:
    """All gates before all ups where they are stacked, by turns in GPT-OSS; a bias after the sum is the first's."""
    sent = {"gate_up_proj": (4, 12, 5), "down_proj": (4, 5, 6)}
    turned = {
        "gate_up_proj": (4, 5, 12),
        "down_proj": (4, 6, 5),
        "gate_up_proj_bias": (4, 12),
        "down_proj_bias": (4, 5),
    }
    for model_type, shapes in (("qwen3_moe", sent), ("gpt_oss", turned)):
        for name, shape in shapes.items():
            tensor = torch.arange(math.prod(shape)).view(shape)
            found = []
            for rank in range(2):
                layer = Experts(rank)
                if model_type != "gpt_oss":
                    del layer.w13_bias, layer.w2_bias
                pieces = pieces_of_experts(layer, "layer.mlp.experts.routed_experts", model_type)
                found.append([piece.sent(tensor) for piece in pieces if piece.name == f"layer.mlp.experts.{name}"])
            assert sorted(element for rank in found for one in rank for element in one.flatten().tolist()) == [
                *range(tensor.numel())
            ], name
            if name == "gate_up_proj" and model_type == "qwen3_moe":  # rows 0 to 5 are gates
                assert [one[0, :, 0].tolist() for one in found[1]] == [[15, 20, 25], [45, 50, 55]]
            if name == "gate_up_proj" and model_type == "gpt_oss":
                assert [one[0, 0].tolist() for one in found[1]] == [[6, 7, 8, 9, 10, 11]]


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
