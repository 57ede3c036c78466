"""`PictureProcessor`: the tokens of a picture in a prompt, their positions, and the input of a tower.

In the text of a prompt a picture is one placeholder token. A row keeps the expanded ids: as many placeholders as the
tower makes features of the picture, with the tokens that the family puts around them.
"""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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


def class_of(config: PretrainedConfig, scalar: bool) -> Any:
    """Transformers' class of a model that reads pictures, for sequence classification if `scalar`.

    Of such classes transformers has that of Qwen3.5. The others are made as it makes those of text: of the layers below
    the output layer, with their names, and a linear layer `score`.
    """
    from transformers import conversion_mapping
    from transformers.modeling_layers import GenericForSequenceClassification
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    )

    generates: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    if not scalar:
        return generates
    if (classifier := MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)) is not None:
        return classifier
    family = next(kind for kind in generates.__mro__ if kind.__name__.endswith("PreTrainedModel"))
    name = generates.__name__.replace("ForConditionalGeneration", "ForSequenceClassification")
    known: Any = conversion_mapping
    if (names_in_files := known.get_checkpoint_conversion_mapping(generates.__name__)) is not None:
        known.register_checkpoint_conversion_mapping(name, names_in_files, overwrite=True)
    return type(name, (GenericForSequenceClassification, family), {"__module__": generates.__module__})


def no_pictures(numbers: Sequence[int]) -> Sequence[Picture]:
    """An album of a run without data, whose rows have no pictures."""
    assert not numbers
    return ()


@dataclass(frozen=True)
class PicturesRead:
    """The pictures of one forward pass, each once, and where the line reads their features.

    Attributes:
        tensors: Arguments of the model's `get_image_features`.
        places: `[P]` int64, flat positions in the line at which a feature stands for a token, ascending.
        features: `[P]` int64, the feature at each of these places, counted over all pictures.
    """

    tensors: Mapping[str, Tensor]
    places: Tensor
    features: Tensor

    def moved(self, places: Tensor) -> PicturesRead:
        """The same pictures in a line in which the token at `i` is at `places[i]`; several tokens may become one."""
        at, first = torch.unique(places[self.places], return_inverse=True)
        features = torch.empty_like(at).scatter_(0, first, self.features)  # tokens that become one read one feature
        return PicturesRead(self.tensors, at, features)


@dataclass(frozen=True)
class PictureReader:
    """Finds the pictures of rows, and makes a model's input from them.

    Attributes:
        processor: Processor of the model.
        album: Function from numbers of pictures to the pictures, see `rlflow.data.pictures.Album`.
    """

    processor: PictureProcessor
    album: Callable[[Sequence[int]], Sequence[Picture]]

    def patches(self, numbers: Sequence[int]) -> int:
        """Patches that the tower computes of these pictures."""
        return sum(self.processor.patches(picture) for picture in self.album(numbers))

    def read(self, rows: Sequence[Tensor], numbers: Sequence[Sequence[int]]) -> tuple[PicturesRead, Tensor]:
        """The pictures that a pass reads for its rows; if these have none, a blank picture that no row reads.

        So the tower runs once in each pass. Ranks that gather its weights together would wait for one another forever
        if some ran it and others did not.

        Args:
            rows: Tokens of each row that the model reads, one row after another in the line.
            numbers: Numbers of each row's pictures. A row's first placeholders are theirs; a model may also sample the
                placeholder's id, which then is a token like any other.

        Returns:
            The pictures, and positions `[1, N]` or `[3, 1, N]` of the tokens.

        Raises:
            UserError: A picture is not of the size that it had when the rows were scanned, or cannot be read.
        """
        processor, first = self.processor, dict[Picture, int]()  # the place of each picture's first feature
        places, features, positions, start, count = list[Tensor](), list[Tensor](), list[Tensor](), 0, 0
        for tokens, of_row in zip(rows, numbers, strict=True):
            pictures = self.album(of_row) if of_row else []
            read = list[Tensor]()
            for picture in pictures:
                size = processor.features(picture)
                if picture not in first:
                    first[picture], count = count, count + size
                read.append(first[picture] + torch.arange(size))
            wanted = sum(map(len, read))
            there = (tokens == processor.placeholder_id).nonzero()[:wanted, 0]
            if len(there) != wanted:
                raise UserError(
                    f"a prompt has places for {len(there)} features of {' and '.join(each.name for each in pictures)},"
                    f" whose size now gives {wanted}; the files changed since the rows were scanned. Start again, with"
                    " files that stay as they are"
                )
            places.append(start + there)
            features += read
            if processor.has_grid_positions:
                positions.append(processor.positions(tokens.tolist(), pictures))
            else:
                positions.append(torch.arange(len(tokens))[None])
            start += len(tokens)
        none = torch.zeros(0, dtype=torch.int64)
        made = PicturesRead(
            processor.inputs(list(first) or [processor.blank]), torch.cat([none, *places]), torch.cat([none, *features])
        )
        along = torch.cat(positions, 1)
        return made, along[:, None] if processor.has_grid_positions else along


class PictureProcessor:
    """Makes the input from pictures for a model of one of `FAMILIES`.

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
        self._lock = Lock()  # `inputs` may be called in several threads
        self._tokenizer = tokenizer
        vision = config.vision_config
        self._patch: int = vision.patch_size
        # Patches down and across that become one feature; and, of Idefics3, features down and across of a square.
        self._merged: int = vision.spatial_merge_size if self.has_grid_positions else config.scale_factor
        self._side: int = 0 if self.has_grid_positions else vision.image_size // vision.patch_size // self._merged

    @classmethod
    def load(cls, path: Path, config: PretrainedConfig, tokenizer: Any = None) -> PictureProcessor:
        """The processor of a model's folder, or of a name on the hub.

        Args:
            path: Folder of the model, or its name on the hub.
            config: The model's transformers configuration.
            tokenizer: The model's tokenizer, which `expansion` needs.

        Raises:
            UserError: There is no image processor, or it is one of another family.
        """
        from transformers import AutoImageProcessor

        try:
            found: Any = AutoImageProcessor.from_pretrained(  # type: ignore[no-untyped-call]
                path, trust_remote_code=False
            )
        except (OSError, ValueError, ImportError) as error:
            raise UserError(
                f"`model` is {str(path)!r}, which reads images, and its image processor cannot be loaded"
                f" ({one_line(error)}); copy preprocessor_config.json from where the model is from"
            ) from error
        wanted = "merge_size" if config.model_type in QWEN else "max_image_size"
        if not hasattr(found, wanted):
            raise UserError(
                f"`model` is {str(path)!r}, of the type {config.model_type!r}, and its image processor is of another"
                f" family, {type(found).__name__}; copy preprocessor_config.json from where the model is from"
            )
        return cls(config, found, tokenizer)

    def facts(self) -> list[Any]:
        """All facts that determine the tokens of a picture, apart from the tokenizer; JSON-able."""
        return [self.placeholder_id, self.has_grid_positions, self._side, self._images.to_json_string()]

    def features(self, picture: Picture) -> int:
        """Number of placeholders of a row that are read as features of the picture, by its size alone."""
        if self.has_grid_positions:
            height, width = self._grid(picture)
            return height * width
        rows, columns = self._squares(picture)
        return (rows * columns + 1) * self._side**2

    def patches(self, picture: Picture) -> int:
        """Patches that the tower computes of the picture."""
        return self.features(picture) * self._merged**2

    def expansion(self, picture: Picture) -> list[int]:
        """The ids that stand in a row for the one placeholder of a picture.

        Source: `Idefics3Processor.replace_image_token` and `Qwen3VLProcessor.replace_image_token` of transformers 5.19.
        """
        if self.has_grid_positions:
            return [self.placeholder_id] * self.features(picture)
        rows, columns = self._squares(picture)
        around, square = "<fake_token_around_image>", "<image>" * self._side**2
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
                f"the prompt has places for {len(places)} images, and the row has {len(pictures)}; name one for each"
                " `<image>` of a text or image part of a message, in a chat template that writes such parts"
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
                assert place < len(ids), "the images are those of the ids"
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

    @cached_property
    def blank(self) -> Picture:
        """The smallest picture."""
        from PIL import Image

        side, file = self._patch * self._merged, BytesIO()
        Image.new("RGB", (side, side)).save(file, format="png")
        return Picture.read(file.getvalue())

    def positions(self, ids: Sequence[int], pictures: Sequence[Picture], more: int = 0) -> Tensor:
        """Positions of the tokens of a row, `[3, N + more]` int64: in time, down and across.

        All three positions of a token of text are one more than the largest before it. A picture of 2 x 3 features at
        the position 4 has the positions 4 4 4 4 4 4, 4 4 4 5 5 5 and 4 5 6 4 5 6. The text after it is at 7 (Qwen2-VL,
        arXiv 2409.12191, section 2.1).

        Args:
            ids: `N` expanded ids of a prompt.
            pictures: Pictures of the prompt.
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

        images, side = self._images, self._patch * self._merged
        try:
            height, width = smart_resize(
                picture.height, picture.width, side, images.size["shortest_edge"], images.size["longest_edge"]
            )
        except ValueError as error:  # a strip
            raise UserError(
                f"the model takes no image of {picture.width} x {picture.height} pixels ({one_line(error)}); cut it"
            ) from error
        return height // side, width // side

    def _squares(self, picture: Picture) -> tuple[int, int]:
        """Rows and columns of the squares that a picture is cut into, in addition to the whole; 0 and 0 if uncut."""
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


# Files of a model that say how pictures are read, and what the chat template is.
FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
    "chat_template.jinja",
)


def copy_processor(path: Path, folder: Path) -> None:
    """Copy the files of a processor, for engines and other programs that load the model with its tower.

    Args:
        path: Folder of a model, or its name on the hub.
        folder: Folder to write.
    """
    from transformers.utils.hub import cached_file

    for name in FILES:
        found = cached_file(str(path), name, _raise_exceptions_for_missing_entries=False)
        if found is not None:
            shutil.copyfile(found, folder / name)
