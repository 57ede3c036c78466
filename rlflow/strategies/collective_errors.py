"""Which errors say of another rank, and not of this one, that something is wrong."""

from __future__ import annotations

import torch.distributed as dist


def of_a_collective(error: BaseException | None) -> bool:
    """Whether the error is that another rank is gone or did not join a collective in time."""
    while error is not None:
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False
