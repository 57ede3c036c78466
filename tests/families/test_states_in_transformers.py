"""The reference engine with layers that carry a state: each row is read as if it were alone, however it is padded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from rlflow.errors import UserError
from rlflow.rollout import EngineSubprocess, Sampling, TransformersEngine, WeightSyncError
from tests.families.states import STATES, change, gaps, prompts, reference, weights, write_model
from tests.rollout.trained import setup
from tests.slow import slow_but

LENGTHS = [5, 300, 17, 64, 1, 129, 5, 33]
SEEDS = list(range(len(LENGTHS)))
SAMPLING = Sampling(16, 1.0, (0,), limits=(3, 16, 7, 16, 16, 2, 9, 16))  # rows are dropped three times
LIMITS = dict.fromkeys(STATES, 1e-5) | {"granitemoehybrid": 2e-5}
# One part; parts of 8 tokens of a row; parts of one token of a row, if padding did not have to be masked.
PREFILLS = [16384, 64, 8]


@pytest.mark.parametrize("name", slow_but(["nemotron_h", "lfm2"], STATES))
def test_each_row_has_the_logprobs_of_a_row_alone_after_each_sync(name: str, tmp_path: Path) -> None:
    folder = write_model(name, tmp_path)
    model = reference(folder)
    for tokens in PREFILLS:
        engine = setup(TransformersEngine(max_batch=8, max_prefill_tokens=tokens), folder)
        for version in range(2):
            engine.update_weights([weights(model)], version)
            completions = engine.generate(prompts(LENGTHS), SEEDS, SAMPLING, version)
            assert max(gaps(model, prompts(LENGTHS), completions)) < LIMITS[name]
            change(model, version)
        assert max(gaps(model, prompts(LENGTHS), completions)) > 100 * LIMITS[name]  # weights one update old


ROUTED = ["glm4_moe", "deepseek_v3", "kimi_linear"]


@pytest.mark.parametrize("name", slow_but(["deepseek_v3"], ROUTED))
def test_the_bias_of_routers_is_sent_in_float32_and_read_back(name: str, tmp_path: Path) -> None:
    folder = write_model(name, tmp_path)
    sent = dict(weights(reference(folder)))  # float32, and the engine has bfloat16
    engine: Any = setup(TransformersEngine(), folder, torch.bfloat16)
    assert engine.update_weights([list(sent.items())], 0).tensors == len(sent)
    bias = next(key for key in sent if key.endswith("correction_bias"))
    assert torch.equal(engine._model.get_buffer(bias), sent[bias])
    with pytest.raises(WeightSyncError, match=f"not sent: {bias}"):
        engine.update_weights([[(key, tensor) for key, tensor in sent.items() if key != bias]], 1)


@pytest.mark.parametrize("name", slow_but([], ["glm4_moe", "falcon_h1"]))
def test_an_engine_in_a_process_of_its_own_follows_a_sync(name: str, tmp_path: Path) -> None:
    folder = write_model(name, tmp_path)
    model = reference(folder)
    engine = setup(EngineSubprocess(TransformersEngine(), index=0, size=1, address="", timeout_s=120.0), folder)
    engine.update_weights([weights(model)], 0)
    completions = engine.generate(prompts(LENGTHS), SEEDS, SAMPLING, 0)
    engine.close()
    assert max(gaps(model, prompts(LENGTHS), completions)) < LIMITS[name]


BIASES = {
    "falcon_h1": "mamba_proj_bias",
    "granitemoehybrid": "mamba_proj_bias",
    "lfm2": "conv_bias",
    "nemotron_h": "use_bias",
}


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_that_padding_would_bring_into_a_state_is_refused(name: str, tmp_path: Path) -> None:
    write_model(name, tmp_path, **{BIASES[name]: True})
    with pytest.raises(UserError, match=rf"at the input of its convolutions \(`{BIASES[name]}`\): padding of shorter"):
        TransformersEngine().check_model(AutoConfig.from_pretrained(tmp_path))
