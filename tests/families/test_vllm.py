"""Every family in vLLM: its logprobs are training's after each sync, every tensor is read back, no class changes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from rlflow.errors import UserError
from rlflow.models.causal_lm import ScoringModel
from rlflow.models.packing import pack
from rlflow.rollout import RolloutEngine, VLLMEngine, WeightSyncError
from rlflow.rollout.vllm.engine import CPU_HEADS
from rlflow.values.batch import TokenRows
from rlflow.values.ragged import Ragged
from tests.families.gap import follow_three_syncs, tensors
from tests.families.models import SERVED
from tests.rollout.trained import PROMPTS, setup
from tests.slow import slow_but

CPU = torch.device("cpu")
Family = Callable[[str], Path]


@pytest.fixture
def engine(request: pytest.FixtureRequest, family: Family) -> Iterator[tuple[RolloutEngine, ScoringModel]]:
    """An engine of the family, and the model that training has built before it."""
    folder = family(request.param)
    model = ScoringModel.load(folder, torch.float32, CPU)
    engine = setup(VLLMEngine(kv_cache_gib=0.25), folder)
    yield engine, model
    engine.close()


@pytest.mark.parametrize("engine", slow_but(["smollm3", "gpt_oss"], SERVED), indirect=True)
def test_logprobs_are_training_s_after_each_sync_and_every_tensor_is_read_back(
    engine: tuple[Any, ScoringModel],
) -> None:
    rollout, model = engine
    follow_three_syncs(rollout, model)
    load_weights = rollout._load
    for number, (spoiled, _) in enumerate(tensors(model)):

        def load_other(weights: Iterator[tuple[str, Tensor]], spoiled: str = spoiled) -> None:
            load_weights((name, last_changed(tensor) if name == spoiled else tensor) for name, tensor in weights)

        rollout._load = load_other
        with pytest.raises(WeightSyncError, match=rf"held otherwise: {spoiled} \(in "):
            rollout.update_weights([tensors(model)], 3 + number)


def last_changed(tensor: Tensor) -> Tensor:
    """`tensor` with another last element."""
    changed = tensor.clone()
    changed.view(-1)[-1] += 1e-3
    return changed


# vLLM has no models of its own for these two, and would decorate the classes that training uses.
@pytest.mark.parametrize("name", ["smollm3", pytest.param("olmo2", marks=pytest.mark.slow)])
def test_an_engine_changes_no_class_that_training_uses(name: str, family: Family) -> None:
    folder = family(name)
    before = ScoringModel.load(folder, torch.float32, CPU)
    found = described(before)
    rows = pack(TokenRows(Ragged.from_lists(PROMPTS[:2]), torch.tensor([[65, 66], [67, 68]]), torch.tensor([2, 2])))
    scores = before(*rows.arguments())[0]
    engine: Any = setup(VLLMEngine(kv_cache_gib=0.25), folder)
    assert type(engine._model).__name__ == "TransformersForCausalLM"
    assert {name: value for name, value in described(before).items() if found.get(name) is not value} == {}
    after = ScoringModel.load(folder, torch.float32, CPU)
    assert type(after.model.model) is type(before.model.model) is not type(engine._model.model)
    for model in (before, after):
        assert torch.equal(model(*rows.arguments())[0], scores)
    engine.close()


def test_cpu_heads_are_the_sizes_that_vllm_s_cpu_attention_supports() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(CPU_HEADS) == CPUAttentionBackend.get_supported_head_sizes()


def described(model: ScoringModel) -> dict[str, Any]:
    """Description of each class in the model's file of transformers and of its bases: bases, order, and members."""
    file = sys.modules[type(model.model).__module__]
    found = {cls for value in vars(file).values() if inspect.isclass(value) for cls in value.__mro__}
    described: dict[str, Any] = {}
    for cls in found:
        if "torch" in cls.__module__ or "transformers" in cls.__module__:
            held = {"bases": cls.__bases__, "order": cls.__mro__, **vars(cls)}
            described |= {
                f"{cls.__module__}.{cls.__qualname__}.{name}": value
                for name, value in held.items()
                if not name.endswith("_cached_value")  # answers that transformers' classes remember
            }
    return described


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("deepseek_v3", r"'deepseek_v3', has latent attention, and vLLM's logprobs differ from .* by up to 0\.14"),
        ("kimi_linear", r"'kimi_linear', has Kimi's delta rule, which vLLM does not build"),
        ("lfm2", r"'lfm2', has convolutions alone, and vLLM's logprobs differ from .* by up to 0\.37"),
        ("nemotron_h", r"'nemotron_h', is a mixture of experts \(n_routed_experts 4\), whose weights it cannot read"),
    ],
)
def test_what_vllm_cannot_serve_rightly_is_refused_by_its_configuration(name: str, told: str, family: Family) -> None:
    with pytest.raises(UserError, match=rf"^`rollout` is VLLMEngine, and the model, of the type {told}"):
        VLLMEngine().check_model(AutoConfig.from_pretrained(family(name)))


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_5"])
def test_a_state_that_ranks_would_divide_is_refused(name: str, family: Family) -> None:
    config = AutoConfig.from_pretrained(family(name))
    VLLMEngine().check_model(config)
    with pytest.raises(UserError, match=r"carries a state, and the parts of its layers on 2 ranks are not read back"):
        VLLMEngine(2).check_model(config)
