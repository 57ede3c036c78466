"""Settings of the C allocator for memory that a step frees."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # M_TRIM_THRESHOLD and so on of glibc's malloc.h
_NEVER = 2**31 - 1
_LARGE = 128 * 2**10  # bytes
_MAPPED = 65536  # pieces at most, as glibc's own default


def keep_freed_memory() -> bool:
    """Let this process reuse the memory that it frees instead of returning it to the system.

    Every page from the system must be faulted in again. With messages and values of tens of MB on the CPU, that takes
    longer than to copy them. The process then stays as large as it was at its largest.

    Returns:
        Whether the allocator took it: it is glibc's. Elsewhere nothing changes.
    """
    return _set(_TRIM_THRESHOLD, _NEVER) and _set(_MMAP_MAX, 0)


def return_freed_memory() -> bool:
    """Let this process return large blocks to the system as soon as it frees them, such as gathered weights of a layer.

    Otherwise the allocator comes to hold as much as a whole model, although there was only one layer at a time.

    Returns:
        Whether the allocator took it: it is glibc's. Elsewhere nothing changes.
    """
    return _set(_MMAP_THRESHOLD, _LARGE) and _set(_TRIM_THRESHOLD, _LARGE) and _set(_MMAP_MAX, _MAPPED)


def _set(option: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(option, value))
