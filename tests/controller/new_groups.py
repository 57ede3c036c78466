"""The process groups that a rank asks torch to form."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from rlflow.databuffer import transport

NewGroup = tuple[tuple[int, ...] | None, bool]  # ranks, and whether its members alone take part


@contextmanager
def recording() -> Iterator[list[NewGroup]]:
    """Records every call of `torch.distributed.new_group`, whoever makes it; no group is there already."""
    calls: list[NewGroup] = []
    new_group = dist.new_group

    def recorded(ranks: Any = None, *args: Any, **settings: Any) -> Any:
        calls.append((None if ranks is None else tuple(ranks), settings.get("use_local_synchronization", False)))
        return new_group(ranks, *args, **settings)

    transport._formed.clear()
    dist.new_group = recorded  # type: ignore[assignment]
    try:
        yield calls
    finally:
        dist.new_group = new_group
