"""Gradients whose norm is too large, skipped by DeepSpeed's optimizers as it skips those that are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rlflow.errors import UserError


@contextmanager
def norm_at_most(optimizer: Any, most: float) -> Iterator[dict[str, float]]:
    """Within it an optimizer of ZeRO 1 to 3 takes a gradient whose norm is above `most` for one that overflowed.

    Its step measures the norm by a method of its own, `scaled_global_norm` at stages 1 and 2 and `_get_norm_groups` at
    3, and passes over an update whose norm is not finite.

    Args:
        optimizer: DeepSpeed's.
        most: Infinite for any.

    Yields:
        What was found to be too large, as `norm`; nothing where the update is made.

    Raises:
        UserError: The optimizer measures it otherwise.
    """
    found: dict[str, float] = {}
    if math.isinf(most):
        yield found
        return
    method = next((name for name in ("scaled_global_norm", "_get_norm_groups") if hasattr(optimizer, name)), None)
    if method is None:
        raise UserError(
            "`trainer.skip_spikes` is set, and DeepSpeed's optimizer of stage 0 in half precision takes every gradient;"
            " set `stage` to 1, 2 or 3, use `strategy: fsdp`, or leave `skip_spikes` out"
        )
    measure = getattr(optimizer, method)

    def measured(*given: Any, **by_name: Any) -> Any:
        norms = measure(*given, **by_name)
        each = norms if isinstance(norms, list) else [norms]
        total = math.sqrt(sum(float(norm) ** 2 for norm in each)) / float(optimizer.loss_scale)
        if not math.isfinite(total) or min(map(float, each)) < 0 or total <= most:  # -1 says that it is not finite
            return norms
        found["norm"] = total
        infinite = torch.full_like(torch.as_tensor(each[0]), math.inf)
        return [infinite] if isinstance(norms, list) else infinite

    setattr(optimizer, method, measured)
    try:
        yield found
    finally:
        delattr(optimizer, method)
