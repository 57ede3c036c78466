"""Small models that read pictures, and rows of text and pictures for them.

The reference is transformers' own forward of one row at a time, with pixels from its image processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from rlflow.models.picture_processor import PictureProcessor
from rlflow.models.tiny import tiny_tokenizer
from rlflow.rollout import Completion
from rlflow.values.picture import Picture
from tests.families.models import DELTA_RULE
from tests.families.states import draw

CONTEXT = 256
IDEFICS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<row_1_col_1>"]
QWEN = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
DECODER_NAMES = ("lm_head.", "model.language_model.", "model.text_model.")
SPECIAL = {"idefics3": IDEFICS, "smolvlm": IDEFICS, "qwen2_5_vl": QWEN, "qwen3_vl": QWEN, "qwen3_5": QWEN}

TEXT = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}
TOWER = {"hidden_size": 64, "intermediate_size": 96}
GRID = {**TOWER, "depth": 2, "num_heads": 2, "out_hidden_size": 128, "spatial_merge_size": 2, "temporal_patch_size": 2}
SQUARES = {**TOWER, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56, "patch_size": 14}


def _rope(*sections: int, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": list(sections), **more}


# Of each family: the prefix of its configuration's class in transformers, its text part and its tower.
TOWERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "idefics3": ("Idefics3", {"model_type": "llama"}, SQUARES),
    "smolvlm": ("SmolVLM", {"model_type": "llama"}, SQUARES),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {"rope_parameters": _rope(4, 6, 6)},
        {**GRID, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1], "tokens_per_second": 2},
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {"head_dim": 32, "rope_parameters": _rope(6, 5, 5, mrope_interleaved=True)},
        {**GRID, "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    ),
    "qwen3_5": (
        "Qwen3_5",
        {
            **DELTA_RULE,
            "head_dim": 32,
            "rope_parameters": _rope(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.25),
        },
        {**GRID, "patch_size": 16, "num_position_embeddings": 64},
    ),
}


def write_tower(name: str, folder: Path, seed: int = 0, **more: int) -> Path:
    """Write the family's model with random weights, its tokenizer and its image processor; return the folder.

    `more` are further settings of its text part.
    """
    prefix, text, tower = TOWERS[name]
    tokenizer = tiny_tokenizer(CONTEXT)
    tokenizer.add_tokens(SPECIAL[name], special_tokens=True)
    of = tokenizer.convert_tokens_to_ids
    if name in ("idefics3", "smolvlm"):
        ids = {"image_token_id": of("<image>"), "scale_factor": 2, "pad_token_id": 1}
        kind = getattr(transformers, f"{prefix}ImageProcessorPil")
        images = kind(size={"longest_edge": 112}, max_image_size={"longest_edge": 56}, do_image_splitting=True)
    else:
        named = {"image_token": 2, "video_token": 3, "vision_start_token": 0, "vision_end_token": 1}
        ids = {f"{key}_id": of(QWEN[place]) for key, place in named.items()}
        side = 2 * tower["patch_size"]
        images = transformers.Qwen2VLImageProcessorPil(
            size={"shortest_edge": side**2, "longest_edge": 64 * side**2}, patch_size=tower["patch_size"]
        )
    config = getattr(transformers, f"{prefix}Config")(
        text_config={**TEXT, **text, **more, "vocab_size": len(tokenizer)},
        vision_config=tower,
        tie_word_embeddings=False,
        **ids,
    )
    with torch.random.fork_rng(devices=[]):
        model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    draw(model, seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if name in ("idefics3", "smolvlm"):  # with the number of features, which vLLM reads
        images = transformers.Idefics3Processor(images, tokenizer, image_seq_len=4)
    images.save_pretrained(folder)
    return folder


def noise(seed: int, width: int, height: int) -> Picture:
    """A picture of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, format="png")
    return Picture.read(file.getvalue())


@dataclass(frozen=True)
class Rows:
    """Prompts with pictures.

    Attributes:
        prompts: Expanded ids of each.
        pictures: Pictures of each, which may be none.
        images: Transformers' image processor.
        processor: The processor of rows.
    """

    prompts: list[list[int]]
    pictures: list[list[Picture]]
    images: Any
    processor: PictureProcessor


def rows_of(folder: Path) -> Rows:
    """Prompts with one picture, one of another size, two, and none; another of the first size; the first, continued.

    In that one the policy has sampled the placeholder of pictures, which stays a token like any other.
    """
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    processor = PictureProcessor.load(folder, config, tokenizer)
    place = "<image>" if config.model_type in ("idefics3", "smolvlm") else "<|vision_start|><|image_pad|><|vision_end|>"
    one, other, third, fourth = noise(1, 84, 56), noise(2, 56, 112), noise(3, 60, 60), noise(4, 112, 56)
    pictures = [[one], [other], [third, fourth], [], [noise(5, 84, 56)], [one]]
    texts = [f"{place}What is it?", f"{place}b", f"a {place} and {place} two", "none here", f"{place}What is it?"]
    texts.append(texts[0])
    prompts = [
        processor.expand(tokenizer(text)["input_ids"], of_prompt)
        for text, of_prompt in zip(texts, pictures, strict=True)
    ]
    prompts[5] += [66, processor.placeholder_id, 67]
    return Rows(prompts, pictures, AutoImageProcessor.from_pretrained(folder), processor)


def reference(folder: Path) -> Any:
    """Transformers' model in `folder`, in float32."""
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def change_tower(model: Any, seed: int, scale: float = 0.02) -> None:
    """Change every tensor of the tower, and of the layers between it and the decoder."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if not name.startswith(DECODER_NAMES):
            weight += scale * torch.randn(weight.shape, generator=generator)


def gaps(model: Any, rows: Rows, completions: Sequence[Completion]) -> list[float]:
    """For each row, the largest difference between the engine's logprobs and those of `model` reading it alone."""
    found = []
    for prompt, pictures, completion in zip(rows.prompts, rows.pictures, completions, strict=True):
        scored = scores(model, rows, [*prompt, *completion.token_ids], len(prompt), pictures)
        found.append(float((scored - torch.tensor(completion.logprobs)).abs().max()))
    return found


@torch.no_grad()
def scores(model: Any, rows: Rows, tokens: Sequence[int], start: int, pictures: Sequence[Picture]) -> Tensor:
    """Log-probabilities of the tokens of a row from `start` on, by transformers' own forward.

    Transformers looks for a picture of every placeholder. So those that were sampled are shown to it as another token,
    and their own embeddings are put in.
    """
    ids = torch.tensor([list(tokens)])
    seen: dict[str, Any] = {}
    if pictures:
        made = rows.images(images=[[each.opened() for each in pictures]], return_tensors="pt")
        seen = {name: made[name] for name in rows.images.model_input_names if name in made}
    placeholders = (ids[0] == model.config.image_token_id).nonzero()[:, 0]
    shown = ids.index_fill(1, placeholders[sum(map(rows.processor.features, pictures)) :], 65)
    if "image_grid_thw" in seen:
        seen["mm_token_type_ids"] = (shown == model.config.image_token_id).int()
    handle = model.get_input_embeddings().register_forward_pre_hook(lambda module, given: (ids,))
    logits = model(input_ids=shown, use_cache=False, **seen).logits[0, start - 1 : -1]  # at t they score token t + 1
    handle.remove()
    return torch.log_softmax(logits, -1).gather(-1, ids[0, start:, None])[:, 0]
