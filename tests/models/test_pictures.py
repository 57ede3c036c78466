"""The tokens of a picture in a row, and their places: against transformers' processors and positions."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from rlflow import CausalLM, RewardModel, ValueModel
from rlflow.errors import UserError
from rlflow.models.attention import check_sequence_parallel
from rlflow.models.packing import pack
from rlflow.models.picture_processor import PictureProcessor, PictureReader
from rlflow.models.tiny import write_tiny_model, write_tiny_vision_model
from rlflow.values.batch import TokenRows
from rlflow.values.ragged import Ragged
from tests.families.towers import noise, rows_of, write_tower
from tests.slow import slow_but

SIZES = [(40, 60), (84, 56), (112, 300), (500, 31)]


def loaded(folder: Path) -> PictureProcessor:
    return PictureProcessor.load(folder, AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_vision_model(tmp_path_factory.mktemp("models") / "tiny_vision")


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("towers")
    return cache(lambda name: write_tower(name, folder / name))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("splits", [False, True])
def test_a_picture_of_idefics_stands_for_what_its_processor_writes(
    size: tuple[int, int], splits: bool, vision: Path
) -> None:
    folder = vision
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)], special_tokens=True)
    images = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": 224}, max_image_size={"longest_edge": 56}, do_image_splitting=splits
    )
    own: Any = transformers.Idefics3Processor(images, tokenizer, image_seq_len=4)
    processor = PictureProcessor(AutoConfig.from_pretrained(folder), images, tokenizer)
    picture, other = noise(0, *size), noise(1, 56, 56)
    written = own(text="a<image><image>b", images=[[picture.opened(), other.opened()]], return_tensors="pt")
    plain = tokenizer("a<image><image>b")["input_ids"]
    assert processor.expand(plain, [picture, other]) == written["input_ids"][0].tolist()
    assert processor.collapse(written["input_ids"][0].tolist(), [picture, other]) == plain
    made = processor.inputs([picture, other])["pixel_values"]
    assert torch.equal(made[:, 0], written["pixel_values"][0])
    assert len(made) * 4 == processor.features(picture) + processor.features(other)
    assert processor.patches(picture) == 4 * processor.features(picture)


@pytest.mark.parametrize("name", slow_but(["qwen3_vl"], ["qwen2_5_vl", "qwen3_vl", "qwen3_5"]))
def test_rows_of_qwen_have_its_counts_and_positions(name: str, tower: Callable[[str], Path]) -> None:
    folder = tower(name)
    processor, rows = loaded(folder), rows_of(folder)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder)
    images = AutoImageProcessor.from_pretrained(folder)
    for prompt, pictures in zip(rows.prompts, rows.pictures, strict=True):
        ids = torch.tensor([[*prompt, 65, 66]])
        grid = images(images=[each.opened() for each in pictures], return_tensors="pt") if pictures else {}
        seen = {"image_grid_thw": grid["image_grid_thw"]} if pictures else {}
        sampled = (ids[0] == processor.placeholder_id).nonzero()[sum(map(processor.features, pictures)) :, 0]
        types = (ids.index_fill(1, sampled, 65) == processor.placeholder_id).int()
        expected, _ = model.model.get_rope_index(ids, mm_token_type_ids=types, **seen)
        assert torch.equal(processor.positions(prompt, pictures, more=2), expected[:, 0])
        if pictures:
            counts = (grid["image_grid_thw"].prod(1) // 4).tolist()
            assert [processor.features(picture) for picture in pictures] == counts
            assert torch.equal(processor.inputs(pictures)["pixel_values"], grid["pixel_values"])
        if not len(sampled):
            assert processor.expand(processor.collapse(prompt, pictures), pictures) == prompt


def test_positions_of_a_picture_are_those_of_the_docstring(tower: Callable[[str], Path]) -> None:
    processor = loaded(tower("qwen3_vl"))
    picture = noise(0, 96, 64)  # 2 x 3 features
    ids = processor.expand([5, 6, 7, 8, processor.placeholder_id], [picture])
    assert processor.positions(ids, [picture], more=1)[:, 4:].tolist() == [
        [4, 4, 4, 4, 4, 4, 7],
        [4, 4, 4, 5, 5, 5, 7],
        [4, 5, 6, 4, 5, 6, 7],
    ]


def test_a_strip_that_qwen_does_not_take_is_refused(tower: Callable[[str], Path]) -> None:
    with pytest.raises(UserError, match=r"^the model takes no image of 900 x 4 pixels \(absolute aspect ratio .*; cut"):
        loaded(tower("qwen3_vl")).features(noise(0, 900, 4))


def test_a_processor_of_another_family_is_refused(tmp_path: Path) -> None:
    folder, other = write_tower("qwen3_vl", tmp_path / "a"), write_tower("idefics3", tmp_path / "b")
    for own in folder.glob("*processor_config.json"):
        own.unlink()
    with pytest.raises(UserError, match=r"its image processor cannot be loaded \(.*copy preprocessor_config.json"):
        loaded(folder)
    AutoImageProcessor.from_pretrained(other).save_pretrained(folder)
    with pytest.raises(UserError, match=r"its image processor is of another family, Idefics3ImageProcessor"):
        loaded(folder)


def test_rows_share_what_is_before_a_picture_of_another_row_only_with_their_own(vision: Path) -> None:
    processor = loaded(vision)
    pictures = [noise(0, 56, 56), noise(1, 56, 56)]
    prompt = processor.expand([65, 66, 67, processor.placeholder_id, 68], pictures[:1])
    numbers = Ragged.from_lists([[0], [1], [0]])
    rows = TokenRows.padded(Ragged.from_lists([prompt] * 3), Ragged.from_lists([[70, 71], [72], [73]]), numbers)
    line = pack(rows, True, PictureReader(processor, lambda asked: [pictures[number] for number in asked]))
    # 11 tokens of a prompt, of the first and third row once, and one more token of the first row's response
    assert line.useful_tokens == 11 + 1 + 11
    assert line.pictures is not None
    assert line.pictures.features.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert line.input_ids[0, line.pictures.places].eq(processor.placeholder_id).all()
    assert len(line.pictures.tensors["pixel_values"]) == 2, "each picture goes through the tower once"


def test_a_file_that_changed_its_size_since_the_scan_is_refused(tower: Callable[[str], Path]) -> None:
    processor = loaded(tower("qwen3_vl"))
    prompt = processor.expand([65, processor.placeholder_id], [noise(0, 64, 64)])
    rows = TokenRows.padded(Ragged.from_lists([prompt]), Ragged.from_lists([[70]]), Ragged.from_lists([[0]]))
    with pytest.raises(UserError, match=r"^a prompt has places for 4 features of an image, whose size now gives 6; "):
        pack(rows, True, PictureReader(processor, lambda asked: [noise(0, 64, 96)]))


def test_a_picture_is_its_file_wherever_it_goes() -> None:
    picture = noise(0, 8, 8)
    again = pickle.loads(pickle.dumps(picture))
    assert (again, hash(again), again.name) == (picture, hash(picture), picture.name)
    assert picture != noise(1, 8, 8)


def test_sequences_with_pictures_are_not_divided(vision: Path) -> None:
    with pytest.raises(
        UserError, match=r"^2 ranks divide the sequences of `actor`, and its model, .*'idefics3', reads images"
    ):
        check_sequence_parallel(AutoConfig.from_pretrained(vision), 2, "actor")


def test_a_model_of_text_is_given_no_prompt_with_pictures(tmp_path: Path) -> None:
    handle = CausalLM("tiny")
    handle.attach(handle.load(write_tiny_model(tmp_path / "tiny"), torch.float32, torch.device("cpu")), handle.plan)
    handle.unread_placeholder = 4
    rows = [TokenRows.padded(Ragged.from_lists([ids]), Ragged.from_lists([[70]])) for ids in ([65, 66], [65, 4])]
    assert handle.logprobs(rows[0]).shape == (1, 1)
    with pytest.raises(UserError, match=r"^'tiny' reads text alone, and it is given prompts with images; take a model"):
        handle.logprobs(rows[1])


@pytest.mark.parametrize("kind", [CausalLM, ValueModel, RewardModel])
def test_a_placeholder_that_a_policy_sampled_is_a_token_at_a_row_s_end(
    kind: type[CausalLM | ValueModel | RewardModel], tmp_path: Path
) -> None:
    handle = kind("tiny")
    handle.attach(handle.load(write_tiny_model(tmp_path / "tiny"), torch.float32, torch.device("cpu")), handle.plan)
    handle.unread_placeholder = 4
    read = {CausalLM: "hidden", ValueModel: "final_values", RewardModel: "scores"}[kind]
    sampled, shown = (
        TokenRows.padded(Ragged.from_lists([prompt]), Ragged.from_lists([response]))
        for prompt, response in ([[65, 66], [70, 4]], [[65, 4], [70, 66]])
    )
    assert len(getattr(handle, read)(sampled)) == 1
    with pytest.raises(UserError, match=r"^'tiny' reads text alone, and it is given prompts with images"):
        getattr(handle, read)(shown)
