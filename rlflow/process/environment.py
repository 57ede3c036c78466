"""This process's place in a job, as environment variables say it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

# Fabric, DeepSpeed and vLLM set them for good.
PLACE = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE")


@contextmanager
def place_kept() -> Iterator[None]:
    """Leave the place as it was: the next run from here would find a job whose ranks somebody else starts, and wait."""
    before = {name: os.environ[name] for name in PLACE if name in os.environ}
    try:
        yield
    finally:
        for name in PLACE:
            os.environ.pop(name, None)
        os.environ.update(before)
