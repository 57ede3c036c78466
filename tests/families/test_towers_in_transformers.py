"""The transformers engine with pictures: logprobs are those of each row alone, after each sync."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlflow.errors import UserError
from rlflow.models.tiny import write_tiny_model
from rlflow.rollout import EngineSubprocess, Sampling, TransformersEngine
from rlflow.rollout.engine import GenerationRequest
from tests.families.states import change, weights
from tests.families.towers import TOWERS, Rows, change_tower, gaps, noise, reference, rows_of, write_tower
from tests.rollout.trained import setup
from tests.slow import slow_but

LIMIT = 1e-5
SEEDS = list(range(6))
LIMITS = (3, 12, 7, 12, 12, 5)
SAMPLING = Sampling(12, 1.0, (0,), limits=LIMITS)


def turns(rows: Rows) -> dict[int, GenerationRequest]:
    """The prompts as turns that begin together."""
    asked = zip(rows.prompts, SEEDS, LIMITS, rows.pictures, strict=True)
    return {number: GenerationRequest(*turn) for number, turn in enumerate(asked)}


@pytest.mark.parametrize("name", slow_but(["idefics3", "qwen3_vl"], TOWERS))
def test_after_each_of_five_syncs_logprobs_with_pictures_are_of_rows_alone(name: str, tmp_path: Path) -> None:
    folder = write_tower(name, tmp_path)
    rows, model = rows_of(folder), reference(folder)
    engine: Any = setup(TransformersEngine(max_batch=4, max_prefill_tokens=60), folder)  # prompts come in parts
    for version in range(5):
        assert engine.update_weights([weights(model)], version).tensors == len(weights(model))
        completions = engine.generate(rows.prompts, SEEDS, SAMPLING, version, rows.pictures)
        assert max(gaps(model, rows, completions)) < LIMIT
        change_tower(model, version)
        stale = gaps(model, rows, completions)
        assert stale.pop(3) < LIMIT  # of the row without pictures
        assert min(stale) > 100 * LIMIT  # the engine's tower is one update old
        change(model, version)
    assert engine.step(turns(rows), SAMPLING, 4) == dict(enumerate(completions))
    (of_text,) = engine.generate(rows.prompts[3:4], SEEDS[3:4], Sampling(12, 1.0, (0,)), 4)
    assert of_text.token_ids == completions[3].token_ids


@pytest.mark.slow
def test_an_engine_in_a_process_of_its_own_reads_the_same_pictures(tmp_path: Path) -> None:
    folder = write_tower("qwen3_vl", tmp_path)
    rows, model = rows_of(folder), reference(folder)
    elsewhere = EngineSubprocess(TransformersEngine(), index=0, size=1, address="", timeout_s=120.0)
    completions = []
    for engine in (TransformersEngine(), elsewhere):
        setup(engine, folder).update_weights([weights(model)], 0)
        completions.append(engine.generate(rows.prompts, SEEDS, SAMPLING, 0, rows.pictures))
        assert engine.step(turns(rows), SAMPLING, 0) == dict(enumerate(completions[0]))
        engine.close()
    assert completions[0] == completions[1]


def test_a_model_of_text_refuses_pictures(tmp_path: Path) -> None:
    engine = setup(TransformersEngine(), write_tiny_model(tmp_path / "tiny"))
    engine.policy_version = 0  # its random weights
    with pytest.raises(UserError, match=r"^a prompt has images \(2\), and the model reads text alone; take a model"):
        engine.generate([[65], [66]], [0, 1], Sampling(4), 0, [[], [noise(0, 9, 9), noise(1, 9, 9)]])
