"""Pictures of samples for a page: read from the dataset of the run, scaled down, and encoded into the page itself."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from rlflow.data.pictures import picture_sources, read_picture, without_pictures
from rlflow.data.prompts import PromptData
from rlflow.dotted_path import column_of
from rlflow.errors import UserError, one_line
from rlflow.values.picture import Picture

MOST_BYTES = 6_000_000  # of all pictures of a page, encoded
SIDE = 320  # pixels, of the longer side


class PagePictures:
    """The pictures of a page.

    Attributes:
        encoded: `data:` URLs.
        left_out: Number of pictures for which there was no room.
    """

    def __init__(self) -> None:
        self.encoded: list[str] = []
        self.left_out = 0
        self._numbers: dict[str, int] = {}  # by digest of the file

    def of_sample(self, row: int, names: Sequence[str], data: PromptData) -> list[dict[str, Any]]:
        """The pictures of a sample's prompt: a `name` of each, and its number in `encoded` or `why` it is not there.

        Args:
            row: Place of the prompt in the dataset.
            names: Names of the pictures in the sample.
            data: The run's data, with resolved columns.
        """
        try:
            pictures = _of_row(row, names, data)
        except UserError as error:
            return [{"name": name, "why": one_line(error)} for name in names]
        return [{"name": name, **self._shown(each)} for name, each in zip(names, pictures, strict=True)]

    def _shown(self, picture: Picture | UserError) -> dict[str, Any]:
        if isinstance(picture, UserError):
            return {"why": one_line(picture)}
        if picture.digest not in self._numbers:
            try:
                encoded = _scaled_down(picture)
            except UserError as error:
                return {"why": one_line(error)}
            if sum(map(len, self.encoded)) + len(encoded) > MOST_BYTES:
                self.left_out += 1
                return {"why": f"left out, as the images of the page have {MOST_BYTES:,} bytes"}
            self._numbers[picture.digest] = len(self.encoded)
            self.encoded.append(encoded)
        return {"number": self._numbers[picture.digest]}


def _of_row(row: int, names: Sequence[str], data: PromptData) -> list[Picture | UserError]:
    """The pictures of a row of the dataset, or why one cannot be shown.

    Raises:
        UserError: The dataset has no such row, or other pictures than these in it.
    """
    source = data.train
    if not row < len(source):
        raise UserError(f"{source.name} has {len(source)} rows now")
    found, place = source.read([row])[0], source.where(row)

    def said(of: dict[str, Any]) -> list[Any]:
        images = None if data.images is None else column_of(of, data.images, place)
        return picture_sources(column_of(of, str(data.prompt), place), images, place)

    if [str(each) for each in said(without_pictures(found, str(data.prompt), data.images))] != list(names):
        raise UserError(f"{place} has other images now")
    return [_read(each, source.folder(row), place) for each in said(found)]


def _read(said: Any, folder: Path | None, place: str) -> Picture | UserError:
    if isinstance(said, str) and said.startswith(("http:", "https:")):
        return UserError("not shown, as the page is made without a network")
    try:
        return read_picture(said, folder, allow_remote=False, place=place)
    except UserError as error:
        return error


def _scaled_down(picture: Picture) -> str:
    """The picture as a `data:` URL of at most `SIDE` pixels a side: JPEG for a photograph, PNG where that is smaller.

    Raises:
        UserError: The file is broken behind its header.
    """
    image = picture.opened()
    image.thumbnail((SIDE, SIDE))
    found = []
    for kind in ("jpeg", "png"):
        file = BytesIO()
        image.save(file, kind)
        found.append(f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}")
    return min(found, key=len)
