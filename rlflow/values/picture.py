"""`Picture`, an encoded image file of a prompt, and its facts that are known before it is decoded."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from typing import Any

from rlflow.errors import UserError, one_line

MOST_PIXELS = 2**26  # of a picture: 67 million, 200 MB as RGB; a small file can claim to hold more


@dataclass(frozen=True, eq=False)
class Picture:
    """An image file, as it was given. Equal files are equal pictures.

    Attributes:
        data: The file's bytes: PNG, JPEG, WebP or another format that Pillow reads.
        width: Width in pixels, as the file's header says.
        height: Height in pixels, as the file's header says.
        name: Name of the picture in errors, such as its path.
    """

    data: bytes = field(repr=False)
    width: int
    height: int
    name: str = "an image"

    @classmethod
    def read(cls, data: bytes, name: str = "an image") -> Picture:
        """The picture in a file's bytes; only the header is read.

        Args:
            data: The file's bytes.
            name: Name of the picture in errors.

        Raises:
            UserError: It is not an image, or has more than `MOST_PIXELS` pixels.
        """
        from PIL import Image

        try:
            # Pillow's own limit is checked when a file is opened, and only warns up to twice its value.
            with Image.open(BytesIO(data)) as image:
                width, height = image.size
        except Image.DecompressionBombError as error:
            raise UserError(f"{name} is too large ({one_line(error)}); scale it down") from error
        except (OSError, ValueError, SyntaxError, EOFError) as error:  # Pillow's formats raise all of these
            raise UserError(f"{name} is not an image that Pillow reads; correct or remove it") from error
        if width * height > MOST_PIXELS:
            raise UserError(
                f"{name} has {width} x {height} pixels, and at most {MOST_PIXELS:,} are decoded; scale it down"
            )
        return cls(data, width, height, name)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file, in hexadecimal."""
        return hashlib.sha256(self.data).hexdigest()

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Picture) and self.digest == other.digest

    def opened(self) -> Any:
        """The decoded picture, a `PIL.Image` in RGB; transparent parts become white.

        Raises:
            UserError: The file is broken behind its header.
        """
        from PIL import Image

        try:
            image = Image.open(BytesIO(self.data))
            if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
                on_white = Image.new("RGBA", image.size, "white")
                return Image.alpha_composite(on_white, image.convert("RGBA")).convert("RGB")
            return image.convert("RGB")
        except (OSError, ValueError, SyntaxError, EOFError) as error:
            raise UserError(f"{self.name} cannot be decoded ({one_line(error)}); correct or remove it") from error
