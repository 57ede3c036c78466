"""What the files of a model are, in a few bytes each: ranks compare them before they load."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

WHOLE = 64 * 2**20  # bytes; of a larger file, its size and so many blocks are read
BLOCKS, BLOCK = 64, 64 * 2**10
READ = {".json", ".safetensors", ".bin", ".jinja", ".model", ".txt", ".py"}  # by transformers, of a model's folder


def model_files(model: Path) -> dict[str, str]:
    """A digest of each file that a model is read from, by name.

    Of a file of more than 64 MiB the beginning, where safetensors keeps names and places, and blocks all through it
    are read, 4 MiB together: enough to tell one training from another, not to find a flipped byte.

    Args:
        model: A folder, or a Hugging Face name that is in the cache.
    """
    folder = model if model.is_dir() else _cached(model)
    if folder is None:
        return {}
    return {path.name: _digest(path) for path in sorted(folder.iterdir()) if path.suffix in READ and path.is_file()}


def _cached(model: Path) -> Path | None:
    from transformers.utils.hub import cached_file

    found = cached_file(str(model), "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found).parent


def _digest(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= WHOLE:
            while part := file.read(2**20):
                digest.update(part)
        else:
            for block in range(BLOCKS):
                digest.update(os.pread(file.fileno(), BLOCK, (size - BLOCK) * block // (BLOCKS - 1)))
    return digest.hexdigest()[:12]
