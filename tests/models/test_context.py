from __future__ import annotations

import pytest
import transformers

from rlflow.errors import UserError
from rlflow.models.architecture import check_positions, positions

LONGROPE = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "pad_token_id": 0}


def phi3() -> transformers.PretrainedConfig:
    return transformers.Phi3Config(
        **SMALL, max_position_embeddings=4096, original_max_position_embeddings=256, rope_parameters=dict(LONGROPE)
    )


def test_a_linear_factor_stretches_the_positions() -> None:
    rope = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    assert positions(transformers.LlamaConfig(**SMALL, max_position_embeddings=512, rope_parameters=rope)) == 2048


def test_a_longrope_model_takes_its_original_length() -> None:
    # Beyond it transformers takes other frequencies, for all sequences of a call.
    assert positions(phi3()) == 256


def test_a_longrope_of_one_kind_of_layers_limits_the_model() -> None:
    rope = {"sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    rope["full_attention"] = LONGROPE | {"original_max_position_embeddings": 128}
    assert positions(transformers.Gemma3TextConfig(**SMALL, head_dim=8, rope_parameters=rope)) == 128


def test_a_sequence_beyond_the_original_length_is_refused_with_that_setting() -> None:
    check_positions(phi3(), 256, "actor", "a row")
    with pytest.raises(UserError, match=r"its model takes 256 \(`original_max_position_embeddings` of its config"):
        check_positions(phi3(), 257, "actor", "a row")


def test_an_error_names_the_longest_response_that_fits_after_a_prompt() -> None:
    check_positions(phi3(), 256, "actor", "a prompt and a response", prompt=6)
    with pytest.raises(UserError, match=r"; lower `module.max_response_length` to at most 250, or `data.max_prompt_l"):
        check_positions(phi3(), 257, "actor", "a prompt and a response", prompt=6)
    with pytest.raises(UserError, match=r"; lower `data.max_prompt_length` to less than 256, or take a model of long"):
        check_positions(phi3(), 257, "actor", "a prompt and a response", prompt=256)


def test_a_model_without_positions_has_no_limit() -> None:
    assert positions(transformers.BloomConfig()) is None
