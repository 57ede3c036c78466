"""Pictures in rows: every form in which a row names one, their tokens before a run, and what is refused."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoConfig, AutoProcessor, AutoTokenizer

from rlflow.data.loader import Loader
from rlflow.data.pictures import Album, portable
from rlflow.data.prompts import Encoder, PromptData
from rlflow.environments.environment import Environment
from rlflow.errors import UserError
from rlflow.models.picture_processor import PictureProcessor
from rlflow.models.tiny import tiny_tokenizer, write_tiny_vision_model
from rlflow.values.batch import Batch
from rlflow.values.picture import MOST_PIXELS, Picture


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_vision_model(tmp_path_factory.mktemp("models") / "tiny_vision")


@pytest.fixture(scope="module")
def processor(model: Path) -> PictureProcessor:
    return PictureProcessor.load(model, AutoConfig.from_pretrained(model), AutoTokenizer.from_pretrained(model))


def png(width: int = 40, height: int = 60, colour: str = "red") -> bytes:
    file = BytesIO()
    Image.new("RGB", (width, height), colour).save(file, format="png")
    return file.getvalue()


def loader(processor: PictureProcessor | None, rows: Any, **settings: Any) -> Loader:
    data = PromptData(rows, prompts_per_step=1, shuffle=False, **settings).resolved()
    tokenizer = tiny_tokenizer() if processor is None else processor._tokenizer
    return Loader(data.train, data, tokenizer, seed=0, processor=processor)


def picture_of(loaded: Loader, draw: int = 0) -> Picture:
    batch, _ = loaded.batch(draw, 0, 1)
    assert isinstance(batch, Batch)
    (found,) = Album(loaded.pictures)(batch.pictures.values.tolist())
    return found


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


FORMS: dict[str, Callable[[Path], Any]] = {
    "a path from the dataset's file": lambda path: path.name,
    "an absolute path": str,
    "a file: URL": lambda path: path.as_uri(),
    "a data: URL": lambda path: data_url(path.read_bytes()),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("in_message", [False, True])
def test_a_row_names_its_picture(form: str, in_message: bool, processor: PictureProcessor, tmp_path: Path) -> None:
    (tmp_path / "a b.png").write_bytes(png())
    said = FORMS[form](tmp_path / "a b.png")
    row: dict[str, Any] = {"prompt": "which?", "image": said}
    if in_message:
        parts = [{"type": "image", "image": said}, {"type": "text", "text": "which?"}]
        row = {"prompt": [{"role": "user", "content": parts}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    loaded = loader(processor, tmp_path / "rows.jsonl", images=None if in_message else "image")
    picture = picture_of(loaded)
    assert (picture.data, picture.width, picture.height) == (png(), 40, 60)
    batch, _ = loaded.batch(0, 0, 1)
    text = processor._tokenizer.decode(batch.prompt_ids.values.tolist())
    expanded = "<fake_token_around_image><global-img><image><image><image><image><fake_token_around_image>"
    assert text == f"<|im_start|>user\n{expanded}which?<|im_end|>\n<|im_start|>assistant\n"
    assert len(json.dumps(batch.rows)) < 250, "the bytes of a picture do not travel with its row"


@pytest.mark.parametrize(
    "value",
    [png(), Image.open(BytesIO(png())), {"bytes": png(), "path": None}, {"bytes": png(), "path": "a.png"}],
    ids=["bytes", "an image of Pillow", "an image of datasets", "with its name"],
)
def test_a_picture_that_is_not_a_path_becomes_a_data_url_of_the_same_pixels(
    value: Any, processor: PictureProcessor
) -> None:
    picture = picture_of(loader(processor, [{"prompt": "which?", "image": value}], images="image"))
    assert picture.opened().tobytes() == Image.open(BytesIO(png())).tobytes()
    assert portable({"name": "x", "n": 1, "of": [None]}) == {"name": "x", "n": 1, "of": [None]}


def test_a_parquet_file_has_pictures_as_datasets_writes_them(processor: PictureProcessor, tmp_path: Path) -> None:
    import datasets

    rows = {"prompt": ["which?"], "image": [Image.open(BytesIO(png()))]}
    made = datasets.Dataset.from_dict(rows, features=None).cast_column("image", datasets.Image())
    made.to_parquet(str(tmp_path / "rows.parquet"))
    for source in (tmp_path / "rows.parquet", made):
        assert picture_of(loader(processor, source, images="image")).data[:4] == b"\x89PNG"


def test_several_pictures_stand_where_the_text_has_their_places(processor: PictureProcessor, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "b.png").write_bytes(png(80, 60))
    row = {"prompt": "is <image> or <image> larger?", "images": ["a.png", "b.png"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    loaded = loader(processor, tmp_path / "rows.jsonl", images="images")
    batch, _ = loaded.batch(0, 0, 1)
    assert [picture.width for picture in Album(loaded.pictures)(batch.pictures.values.tolist())] == [40, 80]
    text = processor._tokenizer.decode(batch.prompt_ids.values.tolist())
    assert re.sub(r"<fake.*?<fake_token_around_image>", "P", text).splitlines()[1] == "is P or P larger?<|im_end|>"


def test_tokens_of_a_picture_count_toward_the_longest_prompt(
    processor: PictureProcessor, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(png())
    own: Any = AutoProcessor.from_pretrained(model)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "which?"}]}]
    text = own.apply_chat_template(messages, add_generation_prompt=True)
    length = len(own(text=text, images=[[Image.open(tmp_path / "a.png")]])["input_ids"][0])
    rows = [{"prompt": "which?", "image": str(tmp_path / "a.png")}]
    assert loader(processor, rows, images="image").scan.longest_prompt == length
    with pytest.raises(UserError, match=f"raise `data.max_prompt_length` to at least {length}"):
        loader(processor, rows, images="image", max_prompt_length=length - 1)


def test_a_broken_picture_is_named_with_its_row_or_dropped_and_counted(
    processor: PictureProcessor, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "b.png").write_bytes(b"GIF8 no picture")
    lines = [{"prompt": "which?", "image": name} for name in ("a.png", "b.png", "c.png")]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(
        UserError, match=r"rows\.jsonl, line 2: .*/b\.png is not an image that Pillow reads; correct or"
    ) as error:
        loader(processor, path, images="image")
    assert "\n" not in str(error.value)
    loaded = loader(processor, path, images="image", overlong_rows="drop")
    dropped = f"2 too long or with images that cannot be read (2), such as {path}, line 2, {path}, line 3"
    assert str(loaded.scan) == f"{path}: 1 of 3 rows kept; {dropped}"


def bomb() -> bytes:
    """A PNG whose header claims 2**13 x (2**13 + 1) pixels."""
    data = bytearray(png())
    data[16:24] = (2**13).to_bytes(4, "big") + (2**13 + 1).to_bytes(4, "big")
    from zlib import crc32

    data[29:33] = crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a file that is not there": ({"image": "none.png"}, {}, "the image 'none.png' cannot be read (No such file"),
    "a bomb": ({"image": data_url(bomb())}, {}, "has 8192 x 8193 pixels, and at most 67,108,864 are decoded"),
    "a remote file": ({"image": "https://x.org/a.png"}, {}, "set `data.allow_remote: true`, or give files"),
    "a URL with a space": (
        {"image": "http://x.org/a b.png"},
        {"allow_remote": True},
        "`data.train`, row 0: the image 'http://x.org/a b.png' cannot be downloaded (URL can't contain control",
    ),
    "no base64": ({"image": "data:;base64,@@"}, {}, "cannot be read"),
    "a number": ({"image": 3}, {}, "an image is 3; give a path, a URL, bytes or a Pillow image"),
    "more pictures than places": (
        {"prompt": "one <image>", "image": [data_url(png())] * 2},
        {},
        "the prompt has places for 1 images, and the row has 2; name one for each",
    ),
    "fewer pictures than places": (
        {"prompt": "one <image> two <image>", "image": [data_url(png())]},
        {},
        "the prompt has places for 2 images, and the row has 1; name one for each",
    ),
    "a part that names none": (
        {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "image": None},
        {"images": None},
        "a part of a message is an image without a path or URL",
    ),
    "two names": (
        {"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], "image": "b.png"},
        {},
        "a message and the column `data.images` both name images; use one of the two",
    ),
    "no chat template": ({"image": data_url(png())}, {"chat_template": False}, "`data.images` is 'image' without"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_pictures_that_cannot_be_placed_are_refused_in_one_line(case: str, processor: PictureProcessor) -> None:
    row, settings, said = REFUSED[case]
    with pytest.raises(UserError, match=re.escape(said)) as error:
        loader(processor, [{"prompt": "which?", **row}], **{"images": "image", **settings})
    assert "\n" not in str(error.value)
    assert MOST_PIXELS == 2**26


@pytest.mark.parametrize("in_message", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("sees", [False, True])
def test_learned_messages_can_have_no_pictures(
    sees: bool, whole: bool, in_message: bool, processor: PictureProcessor
) -> None:
    part = {"type": "image", "image": "none.png"}
    prompt = [{"role": "user", "content": [part] if in_message else "which?"}]
    said = [{"role": "user", "content": "which?"}] * whole + [{"role": "assistant", "content": "red"}]
    row = {"prompt": prompt, "messages": said, "image": "none.png"}
    data = PromptData([row], prompts_per_step=1, images=None if in_message else "image").resolved("responses")
    reads = processor if sees else None
    with pytest.raises(UserError, match="`messages` is a list of messages to learn, and such rows can have no images"):
        Encoder(data, processor._tokenizer, processor=reads)(data.train, [0])


def test_a_model_of_text_is_not_given_pictures() -> None:
    with pytest.raises(UserError, match=r"row 0 has an image, and the model reads text alone; take a model that"):
        loader(None, [{"prompt": "which?", "image": data_url(png())}], images="image")


def test_a_template_without_a_place_for_pictures_is_refused(processor: PictureProcessor, model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    other = PictureProcessor.load(model, AutoConfig.from_pretrained(model), tokenizer)
    with pytest.raises(UserError, match=r"the prompt has places for 0 images, and the row has 1; .* chat template"):
        loader(other, [{"prompt": "which?", "image": data_url(png())}], images="image")


def test_a_spelled_placeholder_in_a_message_is_text(processor: PictureProcessor) -> None:
    (ids,) = loader(processor, [{"prompt": "what is <image>?"}], chat_template=True).batch(0, 0, 1)[0].prompt_ids.rows()
    assert processor.placeholder_id not in ids.tolist()


def test_a_conversation_begins_with_its_tools_and_the_tokens_of_its_pictures(processor: PictureProcessor) -> None:
    """By hand: 28 of the tools, 6 to the user's text, 7 and 7 of the pictures, 3 between them, 2 and 11 behind."""
    rows = [{"question": "<image>and<image>", "shown": [png(), png()]}, {"question": "no", "shown": []}]
    data = PromptData(rows, prompts_per_step=1, prompt="question", images="shown").resolved()
    game = Environment("tests.environments.games.WordGame")
    loaded = Loader(data.train, data, processor._tokenizer, seed=0, environment=game, processor=processor)
    assert loaded.scan.longest_prompt == 28 + 6 + 7 + 3 + 7 + 2 + 11
    assert loaded.scan.most_pictures == 2


def test_each_row_of_a_shuffled_draw_has_its_own_picture(processor: PictureProcessor) -> None:
    rows = [{"prompt": str(width), "image": data_url(png(width, 40))} for width in range(10, 26)]
    data = PromptData(rows, prompts_per_step=8, images="image").resolved()
    loaded = Loader(data.train, data, processor._tokenizer, seed=0, processor=processor)
    held_out = Loader(data.train, data, processor._tokenizer, seed=0, processor=processor, validates=True)
    album = Album(loaded.pictures, held_out.pictures)
    drawn = [loaded.batch(draw, shard, 2)[0] for draw in range(2) for shard in range(2)]
    for batch in [*drawn, held_out.all(0, 1)[0]]:
        assert [str(picture.width) for picture in album(batch.pictures.values.tolist())] == [
            row["prompt"] for row in batch.rows
        ]
    assert {*drawn[0].pictures.values.tolist()}.isdisjoint(held_out.all(0, 1)[0].pictures.values.tolist())
