"""vLLM with pictures: logprobs, syncs that reach the tower, what is refused; all of it without torchvision."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, Gemma3Config

from rlflow.errors import UserError
from rlflow.rollout import Sampling, VLLMEngine, WeightSyncError
from rlflow.rollout.vllm.registration import STAND_INS
from tests.families.states import change, weights
from tests.families.test_states_in_vllm import KERNEL_HEADS, last_changed
from tests.families.towers import TOWERS, change_tower, gaps, reference, rows_of, write_tower
from tests.rollout.trained import setup

LIMIT = 1e-5
SEEDS = list(range(6))
SAMPLING = Sampling(12, 1.0, (0,), limits=(3, 12, 7, 12, 12, 5))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., tuple[Any, Any, Any]]]:
    """`engine(name, dtype)`: an engine of the family, the model that its weights come from, and rows."""
    made: list[Any] = []

    def make(name: str, dtype: torch.dtype = torch.float32, **text: int) -> tuple[Any, Any, Any]:
        folder = write_tower(name, tmp_path, **text)
        VLLMEngine().check_model(AutoConfig.from_pretrained(folder))
        settings: Any = {"kv_cache_gib": 0.1, "max_num_batched_tokens": 64, "max_num_seqs": 16, "max_images": 2}
        made.append(setup(VLLMEngine(**settings), folder, dtype))
        return made[0], reference(folder), rows_of(folder)

    yield make
    for each in made:
        each.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", TOWERS)
def test_after_each_of_five_syncs_logprobs_with_pictures_are_of_rows_alone(
    name: str, engine: Callable[..., tuple[Any, Any, Any]]
) -> None:
    vllm, model, rows = engine(name)
    for version in range(5):
        assert vllm.update_weights([weights(model)], version).tensors == len(weights(model))
        completions = vllm.generate(rows.prompts, SEEDS, SAMPLING, version, rows.pictures)
        assert max(gaps(model, rows, completions)) < LIMIT
        change_tower(model, version)
        stale = gaps(model, rows, completions)
        assert stale.pop(3) < LIMIT  # of the row without pictures
        assert min(stale) > 100 * LIMIT  # the engine's tower is one update old
        change(model, version)
    stepped = dict(vllm.completions(rows.prompts, SEEDS, SAMPLING, version, rows.pictures))
    assert stepped == dict(enumerate(completions))


@pytest.mark.slow
@pytest.mark.parametrize("name", TOWERS)
def test_a_tensor_not_synced_is_named_also_of_the_tower(
    name: str, engine: Callable[..., tuple[Any, Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm, model, _ = engine(name)
    load = vllm._load
    for version, (spoiled, _) in enumerate(weights(model)):

        def load_other(sent: Iterator[tuple[str, Tensor]], spoiled: str = spoiled) -> None:
            load((name, last_changed(tensor) if name == spoiled else tensor) for name, tensor in sent)

        monkeypatch.setattr(vllm, "_load", load_other)
        with pytest.raises(WeightSyncError, match=rf"held otherwise: {spoiled} \(in "):
            vllm.update_weights([weights(model)], version)


@pytest.mark.slow
def test_a_sync_resets_the_encoder_cache_of_pictures_seen_before(
    engine: Callable[..., tuple[Any, Any, Any]],
) -> None:
    vllm, model, rows = engine("qwen3_vl")
    for version in range(2):
        vllm.update_weights([weights(model)], version)
        completions = vllm.generate(rows.prompts, SEEDS, SAMPLING, version, rows.pictures)
        assert max(gaps(model, rows, completions)) < LIMIT
        change_tower(model, version)


@pytest.mark.slow
def test_pictures_that_an_engine_cannot_take_are_refused_and_it_still_works(
    engine: Callable[..., tuple[Any, Any, Any]],
) -> None:
    vllm, model, rows = engine("qwen3_vl")
    vllm.update_weights([weights(model)], 0)
    asked = rows.prompts, SEEDS, SAMPLING, 0
    with pytest.raises(UserError, match=r"^`max_images` is 2, and a prompt has 3; raise it"):
        vllm.generate(*asked, [*rows.pictures[:5], [*rows.pictures[2], rows.pictures[0][0]]])
    completions = vllm.generate(*asked, rows.pictures)
    assert max(gaps(model, rows, completions)) < LIMIT


@pytest.mark.slow
def test_ids_expanded_twice_are_refused(
    engine: Callable[..., tuple[Any, Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm, model, rows = engine("qwen3_vl")
    vllm.update_weights([weights(model)], 0)
    asked = rows.prompts, SEEDS, SAMPLING, 0
    with monkeypatch.context() as expanded_twice:
        expanded_twice.setattr(vllm._processor, "collapse", lambda ids, pictures: ids)
        with pytest.raises(UserError, match=r"a prompt has 19 tokens with its images, and vLLM has read \d+ that are"):
            vllm.generate(*asked, rows.pictures)
    completions = vllm.generate(*asked, rows.pictures)
    assert max(gaps(model, rows, completions)) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("name", TOWERS)
def test_in_bfloat16_the_gap_with_pictures_is_rounding(name: str, engine: Callable[..., tuple[Any, Any, Any]]) -> None:
    vllm, model, rows = engine(name, torch.bfloat16, **(KERNEL_HEADS if name == "qwen3_5" else {}))
    change(model, 0)
    vllm.update_weights([weights(model)], 0)
    completions = vllm.generate(rows.prompts, SEEDS, SAMPLING, 0, rows.pictures)
    assert median(gaps(model, rows, completions)) < 0.1  # against float32
    change_tower(model, 1, scale=0.2)
    assert median(gaps(model, rows, completions)) > 0.3


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchvision") is not None, reason="it needs an environment without torchvision")
def test_no_stand_in_of_torchvision_stays(engine: Callable[..., tuple[Any, Any, Any]]) -> None:
    engine("qwen2_5_vl")
    assert not {*STAND_INS} & sys.modules.keys()
    assert find_spec("torchvision") is None


def test_other_models_with_pictures_and_towers_on_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'gemma3_text', is part of a 'gemma3', which reads more than text"):
        VLLMEngine().check_model(Gemma3Config())
    config = AutoConfig.from_pretrained(write_tower("idefics3", tmp_path))
    with pytest.raises(UserError, match=r"reads images, and its tower was not tried on 2 ranks that share an engine"):
        VLLMEngine(2).check_model(config)
