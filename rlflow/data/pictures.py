"""Pictures in rows of a dataset: where a row has them, how they are read, and the numbers that name them on all ranks.

A row holds a picture as a text, since rows are JSON: a path, which is relative to the dataset's file; a `file:`,
`data:` or `https:` URL. Bytes, images of Pillow and images of `datasets` become `data:` URLs as the row is read. Rows
of a step name a picture by a number, from which each rank finds it in the dataset: no picture is sent.
"""

from __future__ import annotations

import base64
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from http.client import HTTPException
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.error import URLError
from urllib.parse import unquote_to_bytes, urlsplit
from urllib.request import Request, url2pathname, urlopen

from rlflow.errors import UserError, one_line, require
from rlflow.values.picture import Picture

IMAGE, IMAGE_URL = "image", "image_url"  # types of a part of a message
PLACE = "<image>"  # where a picture of `data.images` belongs in a prompt that is a text
HELD_BYTES = 256 * 2**20  # of the files read last
TIMEOUT_S, MOST_BYTES = 30, 64 * 2**20  # of a file that is downloaded
MOST_IN_ROW = 1024  # pictures
MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\x00", b"MM\x00*")  # how image files begin


class UnreadablePicture(UserError):
    """A picture of a row is missing, broken or too large."""


def portable(value: Any) -> Any:
    """A value of a row with its images (bytes of a file, or images of Pillow or `datasets`) as `data:` URLs."""
    if isinstance(value, dict):
        if value.keys() == {"bytes", "path"} and isinstance(value["bytes"] or value["path"], bytes | str):
            return portable(value["bytes"] or value["path"])
        return {name: portable(each) for name, each in value.items()}
    if isinstance(value, list):
        return [portable(each) for each in value]
    if isinstance(value, bytes) and (value.startswith(MAGIC) or value[8:12] == b"WEBP"):
        return _data_url(value)
    if type(value).__module__.startswith("PIL."):
        file = BytesIO()
        value.save(file, format="png")
        return _data_url(file.getvalue())
    return value


def _data_url(data: bytes) -> str:
    return f"data:;base64,{base64.b64encode(data).decode()}"


def read_picture(source: Any, folder: Path | None, allow_remote: bool, place: str) -> Picture:
    """The picture that a row names; only its header is decoded.

    Args:
        source: Value of the row's column: a path or a URL.
        folder: Folder of the dataset's file, from which paths start; None for the working directory.
        allow_remote: Whether files may be downloaded.
        place: Place of the row, for errors.

    Raises:
        UnreadablePicture: There is no such file, or it is not a picture.
        UserError: It may not be downloaded, or the row names it by something other than a text.
    """
    require("PIL", "an image in a row", "images")
    if not isinstance(source, str) or not source:
        raise UserError(f"{place}: an image is {source!r:.60}; give a path, a URL, bytes or a Pillow image")
    kind = source.partition(":")[0] if re.match(r"(data|file|https?):", source) else ""
    if kind.startswith("http") and not allow_remote:
        raise UserError(
            f"{place}: the image {source!r:.100} would be downloaded by every rank; set `data.allow_remote: true`, or"
            " give files"
        )
    try:
        if kind == "data":
            name, data = f"{place}, a data: URL", _decoded(source)
        elif kind in ("http", "https"):
            name, data = source, _downloaded(source)
        else:
            path = Path(url2pathname(urlsplit(source).path) if kind == "file" else source)
            name = str(path if folder is None else folder / path)
            data = Path(name).read_bytes()
        return Picture.read(data, name)
    except UserError as error:
        raise UnreadablePicture(f"{place}: {error}") from error
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or one_line(error)
        raise UnreadablePicture(
            f"{place}: the image {source!r:.100} cannot be read ({why}); correct the file or the row"
        ) from error


def _decoded(url: str) -> bytes:
    """The bytes in a `data:` URL (RFC 2397)."""
    head, comma, data = url.partition(",")
    if not comma:
        raise UserError(f"the image {url!r:.60} is not a data: URL; write data:;base64,DATA")
    return base64.b64decode(data, validate=True) if head.endswith(";base64") else unquote_to_bytes(data)


def _downloaded(url: str) -> bytes:
    try:
        with urlopen(Request(url, headers={"User-Agent": "rlflow"}), timeout=TIMEOUT_S) as answer:
            data: bytes = answer.read(MOST_BYTES + 1)
    except (URLError, HTTPException, TimeoutError) as error:  # the second of a URL with a space, say
        raise UserError(f"the image {url!r:.100} cannot be downloaded ({one_line(error)}); check it") from error
    if len(data) > MOST_BYTES:
        raise UserError(f"the image {url!r:.100} has more than {MOST_BYTES:,} bytes; scale it down")
    return data


def is_picture(part: Any) -> bool:
    """Whether a part of a message's content is a picture."""
    return isinstance(part, dict) and part.get("type") in (IMAGE, IMAGE_URL)


def _parts(messages: Sequence[Any]) -> list[Any]:
    contents = [each.get("content") for each in messages if isinstance(each, dict)]
    return [part for content in contents if isinstance(content, list) for part in content]


def _source_of(part: dict[str, Any]) -> Any:
    """The value by which a part of a message names its picture; None if the part only marks the place."""
    if isinstance(of_url := part.get(IMAGE_URL), dict):  # as OpenAI's interface writes it
        return of_url.get("url")
    return next((part[name] for name in (IMAGE, IMAGE_URL, "url", "path") if part.get(name) is not None), None)


def picture_sources(prompt: Any, images: Any, place: str) -> list[Any]:
    """The values by which a row names its pictures, in the order of their places in the prompt.

    Args:
        prompt: A text, or messages.
        images: Value of the column of images, a picture or a list of them; None if there is none.
        place: Place of the row, for errors.

    Raises:
        UserError: A message and the column both name pictures, or neither says what a part of a message shows.
    """
    in_parts = [_source_of(part) for part in _parts(prompt) if is_picture(part)] if isinstance(prompt, list) else []
    if images is not None:
        if any(source is not None for source in in_parts):
            raise UserError(f"{place}: a message and the column `data.images` both name images; use one of the two")
        return images if isinstance(images, list) else [images]
    if None in in_parts:
        raise UserError(
            f"{place}: a part of a message is an image without a path or URL; write"
            ' {"type": "image", "image": PATH}, or name the column of images in `data.images`'
        )
    return in_parts


def with_places(prompt: Any, pictures: int) -> Any:
    """A prompt as messages in which each picture is a part `{"type": "image"}`, as chat templates read it.

    In a text, `<image>` marks a picture's place; without any, the pictures come first.

    Args:
        prompt: A text, or messages.
        pictures: Number of the row's pictures.
    """
    if isinstance(prompt, list):
        return [_with_places(message) for message in prompt]
    texts = prompt.split(PLACE) if isinstance(prompt, str) and pictures else [prompt]
    parts = [{"type": IMAGE}] * pictures if len(texts) == 1 else []
    for number, text in enumerate(texts):
        parts += [{"type": IMAGE}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return [{"role": "user", "content": parts}]


def _with_places(message: Any) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    return {**message, "content": [{"type": IMAGE} if is_picture(part) else part for part in content]}


def without_pictures(row: dict[str, Any], prompt: str, images: str | None) -> dict[str, Any]:
    """A row without the pictures that are in it as `data:` URLs; their places have the first letters of the URL.

    Args:
        row: Row of the dataset.
        prompt: Column of the prompt.
        images: Column of the images; None if there is none.
    """
    found = dict(row)
    shown = {prompt.split(".")[0], (images or prompt).split(".")[0]} & found.keys()
    for column in [name for name, value in row.items() if any(value is row[each] for each in shown)]:
        found[column] = _shortened(found[column])  # a mixture has a prompt in two columns
    return found


def _shortened(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("data:"):
        return f"{value[:40]}..., {len(value):,} letters"
    if isinstance(value, dict):
        return {name: _shortened(each) for name, each in value.items()}
    return [_shortened(each) for each in value] if isinstance(value, list) else value


def number_of(row: int, place: int, validates: bool) -> int:
    """The number of a picture: the one at `place` of a row of the training or the validation data."""
    return (row * MOST_IN_ROW + place) * 2 + validates


class Album:
    """Finds pictures by their numbers, on any rank; the files read last stay in memory.

    Args:
        train: Function from a row of the training data to its pictures.
        validation: Function from a row of the validation data to its pictures.
    """

    def __init__(
        self, train: Callable[[int], list[Picture]], validation: Callable[[int], list[Picture]] | None = None
    ) -> None:
        self._of = train, validation
        self._held: OrderedDict[tuple[int, int], list[Picture]] = OrderedDict()
        self._lock = Lock()

    def __call__(self, numbers: Sequence[int]) -> list[Picture]:
        """The pictures of these numbers.

        Raises:
            UserError: A picture is not where it was.
        """
        return [self._row(number % 2, number // 2 // MOST_IN_ROW)[number // 2 % MOST_IN_ROW] for number in numbers]

    def _row(self, which: int, row: int) -> list[Picture]:
        with self._lock:
            if (which, row) in self._held:
                self._held.move_to_end((which, row))
                return self._held[which, row]
        read = self._of[which]
        assert read is not None, "there is validation data"
        found = read(row)
        with self._lock:
            self._held[which, row] = found
            while len(self._held) > 1 and sum(map(_nbytes, self._held.values())) > HELD_BYTES:
                self._held.popitem(last=False)
        return found


def _nbytes(pictures: list[Picture]) -> int:
    return sum(len(picture.data) for picture in pictures)
