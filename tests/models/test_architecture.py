from __future__ import annotations

from typing import Any

import pytest
import transformers

from rlflow.errors import UserError
from rlflow.models.architecture import check_architecture
from rlflow.models.logprobs import Softmax
from rlflow.models.mixers import MIXERS, has_states
from tests.families.models import STATEFUL, configuration

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("Mamba", {}, r"'mamba': it carries a state from token to token by MambaMixer, which would pass"),
        ("RecurrentGemma", {}, r"'recurrent_gemma': it carries a state .* by RecurrentGemmaRecurrentBlock, which"),
        ("MiniMax", {}, r"'minimax': it carries a state .* \(`layer_types`: linear_attention\), which would pass"),
        ("Bloom", {}, r"'bloom': it has attention of its own"),
        (
            "Llama4Text",
            {},
            r"'llama4_text': it has layers \(`layer_types`: chunked_attention\), which are not computed",
        ),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}},
            r"'llama': it has a rotary embedding that changes with the longest sequence",
        ),
        (
            "HyperCLOVAX",
            {"logits_scaling": 3.0},
            r"'hyperclovax': it shapes its logits \(logits_scaling 3.0\) in a way",
        ),
        ("Phi", {}, r"'phi': it has a bias in its output layer"),
        ("T5", {}, r"'t5': it is not a causal language model"),
        ("Gemma3", {}, r"'gemma3': it reads more than text"),
        ("Qwen3_5Moe", {}, r"'qwen3_5_moe': it reads more than text, .*: its own part, `AutoModelForCausalLM.from_pre"),
        ("Llama", {"quantization_config": {"quant_method": "mxfp4"}}, r"'llama': it has quantised weights"),
    ],
)
def test_a_model_that_would_be_scored_wrongly_is_refused_by_its_configuration(
    name: str, settings: dict[str, Any], reason: str
) -> None:
    config = getattr(transformers, f"{name}Config")(**settings)
    with pytest.raises(UserError, match=rf"^`model` is of the type {reason}"):
        check_architecture(config, "`model`", scores_tokens=True)


@pytest.mark.parametrize("name", ["Qwen2", "Gemma2", "GptOss", "Olmo2", "SmolLM3", "Qwen3Moe", "Mixtral"])
def test_a_model_of_plain_attention_is_taken(name: str) -> None:
    check_architecture(getattr(transformers, f"{name}Config")(**SMALL), "`model`", scores_tokens=True)


@pytest.mark.parametrize("name", STATEFUL)
def test_a_model_of_known_mixers_is_taken(name: str) -> None:
    check_architecture(configuration(name), "`model`", scores_tokens=True)
    assert has_states(configuration(name))


@pytest.mark.parametrize("name", ["falcon_h1", "granite"])
def test_a_family_without_sequence_classification_has_no_values(name: str) -> None:
    with pytest.raises(UserError, match=rf"^`critic` is of the type '{name}': it is not a model for sequence class"):
        check_architecture(configuration(name), "`critic`", scores_tokens=False)
    check_architecture(configuration("qwen3_5"), "`critic`", scores_tokens=False)


def test_a_mixer_that_is_not_known_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(MIXERS, "NemotronHMamba2Mixer")
    with pytest.raises(UserError, match=r"^`model` is of the type 'nemotron_h': it .* by NemotronHMamba2Mixer, which"):
        check_architecture(configuration("nemotron_h"), "`model`", scores_tokens=True)


def test_a_bias_of_an_output_layer_that_is_replaced_is_accepted() -> None:
    check_architecture(transformers.PhiConfig(**SMALL), "`model`", scores_tokens=False)


def test_settings_that_shape_logits_are_accepted_where_no_logits_are_made() -> None:
    check_architecture(transformers.LlamaConfig(**SMALL, logits_scaling=3.0), "`model`", scores_tokens=False)


@pytest.mark.parametrize(
    ("name", "settings", "softmax"),
    [
        ("Granite", {"logits_scaling": 4.0}, Softmax(scale=0.25)),
        ("Cohere2", {"logit_scale": 0.5}, Softmax(scale=0.5)),
        ("Gemma2", {"final_logit_softcapping": 2.0}, Softmax(cap=2.0)),
        ("FalconH1", {"lm_head_multiplier": 0.25}, Softmax(scale=0.25)),
        ("GraniteMoeHybrid", {"logits_scaling": 4.0, "mamba_n_heads": 2, "mamba_d_head": 32}, Softmax(scale=0.25)),
        ("HyperCLOVAX", {"logits_scaling": 4.0}, Softmax()),  # it would multiply, and is refused
    ],
)
def test_a_setting_shapes_logits_where_its_meaning_is_known(name: str, settings: Any, softmax: Softmax) -> None:
    assert Softmax.of(getattr(transformers, f"{name}Config")(**SMALL, **settings)) == softmax
