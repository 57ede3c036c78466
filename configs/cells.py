"""Pictures of coloured cells, and how many of them have one colour: `vlm_quickstart_sft.yaml` names what is here.

A picture is drawn from a seed, so nothing is downloaded. Who does not look at it can only guess.
"""

from __future__ import annotations

import random
from typing import Any

COLOURS = {"red": (220, 40, 40), "blue": (40, 40, 220)}
SIDE, CELL = 4, 14  # cells down and across; pixels of one, a patch of `tiny_vision`


def count(draws: random.Random, noise: bool = False) -> dict[str, Any]:
    """A row: a picture of 4 x 4 cells, a colour, and how many cells have it.

    Args:
        draws: Generator from which the row is drawn.
        noise: Draw random pixels in place of the cells.
    """
    from PIL import Image

    share = draws.random()
    cells = ["red" if draws.random() < share else "blue" for _ in range(SIDE * SIDE)]
    asked = draws.choice([*COLOURS])
    image = Image.new("RGB", (SIDE, SIDE))
    image.putdata([COLOURS[cell] for cell in cells])
    image = image.resize((SIDE * CELL, SIDE * CELL), Image.Resampling.NEAREST)
    if noise:
        image = Image.frombytes("RGB", image.size, draws.randbytes(3 * image.width * image.height))
    return {"image": image, "question": asked, "answer": str(cells.count(asked))}


def count_in_noise(draws: random.Random) -> dict[str, Any]:
    """A row of `count` whose picture shows nothing."""
    return count(draws, noise=True)
