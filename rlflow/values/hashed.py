"""`hashed`, a number that follows from a text: the same in every process, and another for another text."""

from __future__ import annotations

import hashlib


def hashed(text: str, size: int = 8) -> int:
    """The first `size` bytes of the text's BLAKE2b as a number, not below 0."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "big")
