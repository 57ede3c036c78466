"""`PictureProcessor`: the tokens that stand for a picture in a prompt, their positions, and what a tower reads of it.

In the text of a prompt a picture is one placeholder token. A row keeps the expanded ids: as many placeholders as the
tower makes features of the picture, with the tokens that the family puts around them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlflow.errors import UserError, one_line
from rlflow.values.picture import Picture

if TYPE_CHECKING:
    from transformers import PretrainedConfig

QWEN = {"qwen2_5_vl", "qwen3_vl", "qwen3_5"}  # a grid of patches of any size, and positions in three dimensions
IDEFICS = {"idefics3", "smolvlm"}  # squares of one size, and positions along the line
FAMILIES = QWEN | IDEFICS  # values of `model_type` whose towers are run here
HELD_BYTES = 256 * 2**20  # of tensors made of the pictures read last


def reads_pictures(config: PretrainedConfig) -> bool:
    """Whether a model has a tower for pictures, of a family that is known here."""
    return config.model_type in FAMILIES


class PictureProcessor:
    """Makes what a model of one of `FAMILIES` reads of pictures.

    Args:
        config: The model's transformers configuration.
        image_processor: The model's image processor of transformers.
        tokenizer: The model's tokenizer.

    Attributes:
        placeholder_id: Id of the token in whose place the features of a picture are read.
        has_grid_positions: Whether a token has a position in each of three dimensions, see `positions`.
    """

    def __init__(self, config: PretrainedConfig, image_processor: Any, tokenizer: Any) -> None:
        assert reads_pictures(config), config.model_type
        self.placeholder_id: int = config.image_token_id
        self.has_grid_positions = config.model_type in QWEN
        self._images = image_processor
        self._held: OrderedDict[Picture, dict[str, Tensor]] = OrderedDict()
        self._lock = Lock()  # pictures of the next step are read while others are
        if self.has_grid_positions:
            self._merge: int = config.vision_config.spatial_merge_size
        else:
            vision = config.vision_config
            self._patch_size: int = vision.patch_size
            self._features_of_square: int = (vision.image_size // vision.patch_size // config.scale_factor) ** 2
            self._tokenizer = tokenizer

    @classmethod
    def load(cls, path: Path, config: PretrainedConfig, tokenizer: Any) -> PictureProcessor:
        """The processor of a model's folder, or of a name on the hub.

        Args:
            path: Folder of the model, or its name on the hub.
            config: The model's transformers configuration.
            tokenizer: The model's tokenizer.

        Raises:
            UserError: There is no image processor, or it is one of another family.
        """
        from transformers import AutoImageProcessor

        try:
            found: Any = AutoImageProcessor.from_pretrained(path)
        except (OSError, ValueError, ImportError) as error:
            raise UserError(
                f"`model` is {str(path)!r}, which reads pictures, and its image processor cannot be loaded"
                f" ({one_line(error)}); copy preprocessor_config.json from where the model is from"
            ) from error
        wanted = "merge_size" if config.model_type in QWEN else "max_image_size"
        if not hasattr(found, wanted):
            raise UserError(
                f"`model` is {str(path)!r}, of the type {config.model_type!r}, and its image processor is a"
                f" {type(found).__name__}, of another family; copy preprocessor_config.json from where the model is from"
            )
        return cls(config, found, tokenizer)

    def features(self, picture: Picture) -> int:
        """How many placeholders of a row are read as features of the picture, by its size alone."""
        if self.has_grid_positions:
            height, width = self._grid(picture)
            return height * width
        rows, columns = self._squares(picture)
        return (rows * columns + 1) * self._features_of_square

    def patches(self, picture: Picture) -> int:
        """Patches that the tower computes for the picture; each costs about as much as a token."""
        if self.has_grid_positions:
            return self.features(picture) * self._merge**2
        rows, columns = self._squares(picture)
        side = self._images.max_image_size["longest_edge"]
        return (rows * columns + 1) * (side // self._patch_size) ** 2

    def expansion(self, picture: Picture) -> list[int]:
        """The ids that stand in a row for the one placeholder of a picture.

        Source: `Idefics3Processor.replace_image_token` and `Qwen3VLProcessor.replace_image_token` of transformers 5.19.
        """
        if self.has_grid_positions:
            return [self.placeholder_id] * self.features(picture)
        rows, columns = self._squares(picture)
        around, square = "<fake_token_around_image>", "<image>" * self._features_of_square
        text = f"{around}<global-img>{square}{around}"
        if rows:
            of_row = (
                "".join(f"{around}<row_{row + 1}_col_{column + 1}>{square}" for column in range(columns)) + "\n"
                for row in range(rows)
            )
            text = f"{''.join(of_row)}\n{text}"
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def expand(self, ids: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
        """The ids of a row, from ids in which each picture is one placeholder.

        With pictures of 2 and 1 features and the placeholder 9, the ids `5 9 6 9 7` become `5 9 9 6 9 7`.

        Raises:
            UserError: There are more or fewer placeholders than pictures.
        """
        places = [place for place, token in enumerate(ids) if token == self.placeholder_id]
        if len(places) != len(pictures):
            raise UserError(
                f"the prompt has {len(places)} places for pictures, and the row has {len(pictures)} pictures; write"
                ' {"type": "image"} in a message where each picture belongs'
            )
        found, start = list[int](), 0
        for place, picture in zip(places, pictures, strict=True):
            found += [*ids[start:place], *self.expansion(picture)]
            start = place + 1
        return [*found, *ids[start:]]

    def collapse(self, ids: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
        """The inverse of `expand`."""
        ids = list(ids)
        found, start = list[int](), 0
        for picture in pictures:
            expansion = self.expansion(picture)
            place = start
            while ids[place : place + len(expansion)] != expansion:
                place += 1
                assert place < len(ids), "the pictures are those of the ids"
            found += [*ids[start:place], self.placeholder_id]
            start = place + len(expansion)
        return [*found, *ids[start:]]

    def inputs(self, pictures: Sequence[Picture]) -> dict[str, Tensor]:
        """Arguments of the model's `get_image_features`, those of the pictures one after another.

        Returns:
            For Qwen `pixel_values` `[patches, values]` float32 and `image_grid_thw` `[pictures, 3]` int64; for Idefics3
            `pixel_values` `[squares, 1, 3, side, side]` and `pixel_attention_mask` `[squares, 1, side, side]`.

        Raises:
            UserError: A file is broken behind its header.
        """
        of_pictures = [self._read(picture) for picture in pictures]
        return {name: torch.cat([each[name] for each in of_pictures]) for name in of_pictures[0]}

    def blank(self) -> Picture:
        """The smallest picture: towers read it where a pass of the other ranks has pictures, and one's own has none."""
        from PIL import Image

        side = 2 * self._images.patch_size * self._merge if self.has_grid_positions else 2
        file = BytesIO()
        Image.new("RGB", (side, side)).save(file, format="png")
        return Picture.read(file.getvalue())

    def positions(self, ids: Sequence[int], pictures: Sequence[Picture], more: int = 0) -> Tensor:
        """Positions of the tokens of a row, `[3, N + more]` int64: in time, down and across.

        All three of a token of text are one more than the largest before it. A picture of 2 x 3 features at the
        position 4 has the positions 4 4 4 4 4 4, 4 4 4 5 5 5 and 4 5 6 4 5 6, and text goes on at 7 (Qwen2-VL, arXiv
        2409.12191, section 2.1).

        Args:
            ids: `N` expanded ids of a prompt.
            pictures: Its pictures.
            more: Number of tokens of text that follow, such as a response's.
        """
        assert self.has_grid_positions
        pieces, at, place = list[Tensor](), 0, 0
        for picture in pictures:
            first = list(ids).index(self.placeholder_id, place)
            height, width = self._grid(picture)
            pieces.append(torch.arange(at, at + first - place).expand(3, -1))
            at += first - place
            down = torch.arange(height).repeat_interleave(width)
            pieces.append(at + torch.stack([torch.zeros_like(down), down, torch.arange(width).repeat(height)]))
            place, at = first + height * width, at + max(height, width)
        pieces.append(torch.arange(at, at + len(ids) - place + more).expand(3, -1))
        return torch.cat(pieces, 1)

    def _grid(self, picture: Picture) -> tuple[int, int]:
        """Features down and across."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        images, side = self._images, self._images.patch_size * self._merge
        try:
            height, width = smart_resize(
                picture.height, picture.width, side, images.size["shortest_edge"], images.size["longest_edge"]
            )
        except ValueError as error:  # a strip
            raise UserError(
                f"the model takes no picture of {picture.width} x {picture.height} pixels ({one_line(error)}); cut it"
            ) from error
        return height // side, width // side

    def _squares(self, picture: Picture) -> tuple[int, int]:
        """Rows and columns of the squares into which the picture is cut, in addition to itself as one; 0 and 0 if not."""
        _, rows, columns = self._images.get_number_of_image_patches(picture.height, picture.width)
        return rows, columns

    def _read(self, picture: Picture) -> dict[str, Tensor]:
        with self._lock:
            if picture in self._held:
                self._held.move_to_end(picture)
                return self._held[picture]
        made = self._images(images=[picture.opened()], return_tensors="pt")
        found = {name: made[name] for name in self._images.model_input_names if name in made}
        if not self.has_grid_positions:  # [1, squares, ...], and a row has any number of squares
            found = {name: tensor.transpose(0, 1) for name, tensor in found.items()}
        with self._lock:
            self._held[picture] = found
            while len(self._held) > 1 and sum(map(_nbytes, self._held.values())) > HELD_BYTES:
                self._held.popitem(last=False)
        return found


def _nbytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
