"""Pictures that a model, an engine or a graph cannot take end in one line, before weights are loaded."""

from __future__ import annotations

import json
import shutil
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import Qwen2VLImageProcessorPil

from rlflow.models.tiny import write_tiny_vision_model
from tests.bad_input.refusal import Refused
from tests.own_folder import TWO_RANKS

VLLM = {"class_path": "rlflow.rollout.VLLMEngine", "init_args": {"max_images": 1}}
DIVIDED = {"ranks": [0, 1], "sequence_parallel_size": 2}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "a model of text": (
        {"module.init_args.actor.model": "tiny"},
        "line 1 has an image, and the model reads text alone; take a model that reads images",
    ),
    "more pictures than the engine takes": (
        {"rollout": VLLM},
        "`rollout.init_args.max_images` is 1, and a prompt has 2; raise it, or give fewer images",
    ),
    "more tokens than a prompt may have": (
        {"data.max_prompt_length": 8},
        "8 of 8 rows exceed `data.max_prompt_length` 8 tokens, the first of them pictured.jsonl, line 1.",
    ),
    "more tokens than the model's context": (
        {"module.init_args.actor.model": "short"},
        "`actor` reads the longest row of the data, 39 tokens, and its model takes 16",
    ),
    "a template without a place": (
        {"module.init_args.actor.model": "no_place"},
        "line 1: the prompt has places for 0 images, and the row has 2; name one for each",
    ),
    "a processor of another family": (
        {"module.init_args.actor.model": "other_processor"},
        "its image processor is of another family, Qwen2VLImageProcessorPil; copy preprocessor_config.json",
    ),
    "sequences on two ranks": (
        {**TWO_RANKS, "placement": {"actor": DIVIDED}},
        "set `sequence_parallel_size` of its placement to 1",
    ),
}


@pytest.fixture
def pictured(folder: Path) -> dict[str, Any]:
    """Changes of the config for rows with two pictures and a model that reads them; and models that cannot."""
    file = BytesIO()
    Image.new("RGB", (40, 60), "red").save(file, format="png")
    (folder / "a.png").write_bytes(file.getvalue())
    row = json.dumps({"question": "which?", "answer": "1", "image": ["a.png", "a.png"]})
    (folder / "pictured.jsonl").write_text(f"{row}\n" * 8)
    vision = write_tiny_vision_model(folder / "vision")
    write_tiny_vision_model(folder / "short", max_position=16)
    for name in ("no_place", "other_processor"):
        shutil.copytree(vision, folder / name)
    (folder / "no_place" / "chat_template.jinja").write_text("{% for each in messages %}{{ each.role }}{% endfor %}")
    (folder / "other_processor" / "processor_config.json").unlink()
    Qwen2VLImageProcessorPil().save_pretrained(folder / "other_processor")
    return {
        "module.init_args.actor.model": "vision",
        "data.train.init_args.path": "pictured.jsonl",
        "data.images": "image",
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_pictures_that_cannot_be_read_are_refused_before_a_model_is_loaded(
    case: str, pictured: dict[str, Any], refused: Refused
) -> None:
    changes, line = CASES[case]
    assert line in refused({**pictured, **changes})
