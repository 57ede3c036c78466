"""Sizes of mixtures of experts, against what transformers makes of the same configuration, and published numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from rlflow import CausalLM
from rlflow.errors import UserError
from rlflow.memory.role_bytes import loaded_role
from rlflow.models.architecture import cached_bytes
from rlflow.models.sizes import KNOWN, ModelSize, size_of
from rlflow.models.tiny import write_tiny_vision_model
from rlflow.strategies import SingleProcess
from rlflow.values.layout import Layout
from tests.families.models import COMMON, FAMILIES, configuration
from tests.families.towers import TOWERS, write_tower
from tests.slow import slow_but

# Of each config.json what its class does not say by itself.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen/Qwen3-0.6B": (
        "Qwen3",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen/Qwen3-8B": (
        "Qwen3",
        {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_key_value_heads": 8},
    ),
    "Qwen/Qwen3-30B-A3B": (
        "Qwen3Moe",
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
        },
    ),
    "mistralai/Mixtral-8x7B-v0.1": ("Mixtral", {}),
    "openai/gpt-oss-20b": ("GptOss", {"num_hidden_layers": 24, "num_local_experts": 32}),
}


def parameters(prefix: str, **settings: Any) -> int:
    """The number of parameters that transformers counts."""
    with torch.device("meta"):
        model = getattr(transformers, f"{prefix}ForCausalLM")(getattr(transformers, f"{prefix}Config")(**settings))
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_known_size_is_that_of_transformers_model(name: str) -> None:
    prefix, settings = CONFIGS[name]
    assert KNOWN[name].parameters == parameters(prefix, **settings)


READ = ["qwen3", "qwen3_moe", "mixtral", "gpt_oss", "gemma2", "olmo2", "starcoder2"]


@pytest.mark.parametrize("name", READ)
def test_a_size_is_read_from_a_configuration(name: str, tmp_path: Path) -> None:
    prefix, settings = FAMILIES[name]
    config = getattr(transformers, f"{prefix}Config")(**COMMON | settings)
    config.save_pretrained(tmp_path)
    assert size_of(str(tmp_path)).parameters == parameters(prefix, **COMMON | settings)


@pytest.mark.parametrize(
    ("name", "active", "multiplied"),
    [
        # Qwen3 Technical Report, arXiv 2505.09388, table 2: 3.3 of 30.5 thousand million.
        ("Qwen/Qwen3-30B-A3B", 3.35e9, 3.04e9),
        # Mixtral of Experts, arXiv 2401.04088: 13 of 47.
        ("mistralai/Mixtral-8x7B-v0.1", 12.88e9, 12.75e9),
        # gpt-oss model card, arXiv 2508.10925, table 1: 3.61 of 20.91, without the input embedding.
        ("openai/gpt-oss-20b", 4.19e9, 3.61e9),
    ],
)
def test_a_token_takes_part_of_a_mixture(name: str, active: float, multiplied: float) -> None:
    assert KNOWN[name].active == pytest.approx(active, rel=0.003)
    assert KNOWN[name].multiplied == pytest.approx(multiplied, rel=0.003)


SIZED = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "falcon_h1", "granitemoehybrid", "lfm2"]


@pytest.mark.parametrize("name", SIZED)
def test_the_size_of_a_model_with_states_is_what_transformers_counts_and_caches(name: str, tmp_path: Path) -> None:
    config = configuration(name)
    config.save_pretrained(tmp_path)
    size, model = size_of(str(tmp_path)), AutoModelForCausalLM.from_config(config)
    assert size.parameters == sum(parameter.numel() for parameter in model.parameters())
    cache = model(torch.tensor([[5, 6, 7]]), use_cache=True).past_key_values
    states = [getattr(layer, kind, {}) for layer in cache.layers for kind in ("conv_states", "recurrent_states")]
    assert size.state_bytes == sum(4 * state.numel() for kind in states for state in kind.values() if state is not None)
    keys = [layer.keys for layer in cache.layers if isinstance(getattr(layer, "keys", None), torch.Tensor)]
    assert 3 * size.cache_bytes(4) == sum(2 * 4 * key.numel() for key in keys)
    assert 3 * cached_bytes(config, torch.float32, 1) == 3 * size.cache_bytes(4)


@pytest.mark.parametrize("name", slow_but(["qwen3_5"], TOWERS))
def test_the_size_of_a_model_that_reads_pictures_is_what_transformers_counts(name: str, tmp_path: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(write_tower(name, tmp_path))
    size = size_of(str(tmp_path))
    assert size.parameters == sum(parameter.numel() for parameter in model.parameters())
    decoder = {*model.get_decoder().parameters(), model.get_output_embeddings().weight}
    assert size.tower == sum(parameter.numel() for parameter in {*model.parameters()} - decoder)


def test_a_frozen_tower_is_not_among_the_parameters_that_are_trained(tmp_path: Path) -> None:
    size = size_of(str(write_tiny_vision_model(tmp_path / "tiny_vision")))
    assert size.parameters == KNOWN["tiny_vision"].parameters == 237_120
    layout, one = Layout((0,), 1), SingleProcess()
    handles = [CausalLM("m", freeze_vision_tower=freezes) for freezes in (False, True)]
    trained = [loaded_role(handle, size, one, layout, samples=8).trained for handle in handles]
    assert trained == [237_120, 237_120 - size.tower]


def test_a_latent_is_what_a_token_takes_where_keys_are_made_of_it() -> None:
    # 2 layers of 64 and 32 numbers of 2 bytes; Kimi's has one such layer
    assert cached_bytes(configuration("deepseek_v3"), torch.bfloat16, 4) == 2 * (64 + 32) * 2
    assert cached_bytes(configuration("kimi_linear"), torch.bfloat16, 4) == (64 + 32) * 2


@pytest.mark.parametrize(("kind", "tied"), [("gemma2", True), ("llama", False), ("of_nobody", False)])
def test_a_config_that_does_not_say_whether_embeddings_are_tied_is_read_as_its_type(
    kind: str, tied: bool, tmp_path: Path
) -> None:
    given = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": 100, **given}))
    assert size_of(str(tmp_path)).tied is tied


def test_many_tokens_take_more_of_a_mixture_than_one() -> None:
    # One layer, four experts of 3 * 2 * 5 = 30 parameters, two for a token: one token misses 2 of 4, two miss 1.
    size = ModelSize(2, 5, 1, 1, 1, 10, experts=4, experts_per_token=2)
    assert [size.parameters - size.touched(tokens) for tokens in (1, 2, 1000)] == [60, 30, 0]
    assert ModelSize(2, 5, 1, 1, 1, 10).touched(1) == ModelSize(2, 5, 1, 1, 1, 10).parameters


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            {"model_type": "qwen2_moe", "num_experts": 4},
            r"\(num_experts 4\) of the type 'qwen2_moe', whose size",
        ),
        (
            {"model_type": "nemotron_h", "num_hidden_layers": 52},
            r"of the type 'nemotron_h', whose layers are of four kinds",
        ),
        ({"model_type": "qwen3_moe", "num_experts": 4, "mlp_only_layers": [0]}, "with layers that have none, whose"),
    ],
)
def test_another_mixture_s_size_is_not_known(config: dict[str, Any], told: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=told):
        size_of(str(tmp_path))
