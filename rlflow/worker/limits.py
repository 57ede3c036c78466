"""What a worker may take."""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.errors import UserError

MB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What the code in a worker may take; a call that takes more ends, and its worker with it.

    Args:
        seconds: Of one call, waiting included; the start of a process and its imports do not count.
        start_seconds: Of the start of a process and of the import of a module.
        memory_mb: Of a process of the worker, in address space, which is more than what it touches; None for no limit.
        file_mb: The largest file that it may write.
        output_kb: What is kept of what it prints; the rest is read and dropped.
    """

    seconds: float = 60.0
    start_seconds: float = 120.0
    memory_mb: int | None = 4096
    file_mb: int = 256
    output_kb: int = 64

    def __post_init__(self) -> None:
        for name in ("seconds", "start_seconds", "memory_mb", "file_mb", "output_kb"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"`{name}` is {value}; give more than 0")
