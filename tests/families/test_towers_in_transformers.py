"""The transformers engine with pictures: logprobs are those of each row alone, after each sync."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlflow.rollout import Sampling, TransformersEngine
from tests.families.states import change, weights
from tests.families.towers import TOWERS, gaps, reference, rows_of, write_tower
from tests.rollout.trained import setup
from tests.slow import slow_but

LIMIT = 1e-5


@pytest.mark.parametrize("name", slow_but(["idefics3", "qwen3_vl"], TOWERS))
def test_logprobs_with_pictures_are_of_rows_alone_after_each_sync(name: str, tmp_path: Path) -> None:
    folder = write_tower(name, tmp_path)
    rows, model = rows_of(folder), reference(folder)
    image = rows.processor.placeholder_id
    engine: Any = setup(TransformersEngine(max_batch=4, max_prefill_tokens=60), folder)
    sampling = Sampling(12, 1.0, (0, image), limits=(3, 12, 7, 12, 12, 2))
    for version in range(3):
        engine.update_weights([weights(model)], version)
        completions = engine.generate(rows.prompts, list(range(6)), sampling, version, rows.pictures)
        print(gaps(model, rows, completions))
        assert max(gaps(model, rows, completions)) < LIMIT
        change(model, version)
        print(gaps(model, rows, completions))
        assert max(gaps(model, rows, completions)) > 100 * LIMIT  # the engine is one update old
