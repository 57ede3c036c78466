"""What the C allocator does with memory that a step frees."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of glibc's malloc.h
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let this process reuse what it frees instead of handing it back to the system, from which every page must be
    faulted in again: with messages and values of tens of MB on the CPU that takes longer than to copy them. The
    process then stays as large as it was at its largest.

    Returns:
        Whether the allocator took it: it is glibc's. Elsewhere nothing changes.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_TRIM_THRESHOLD, _NEVER)) and bool(mallopt(_MMAP_MAX, 0))
