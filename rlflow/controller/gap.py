"""The gap between rollout and training logprobs: the alarm for stale or wrong weights in the rollout engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.metrics import Metrics
from rlflow.values.rollout import Rollout

GAP = "sync/logprob_gap"
LARGEST_GAP = "sync/logprob_gap_max"


class LogprobGap:
    """Compares what the engine said of its tokens with what the trainer says, at equal weights.

    It watches the followed role's forward passes from the rollout until that role's first update, and takes the first
    over each of this rank's rows; of these, rows that other weights generated do not count.

    Args:
        limit: Largest mean |logprob - rollout logprob| over all tokens of a step; above it the run stops.
    """

    def __init__(self, metrics: Metrics, limit: float) -> None:
        self._metrics = metrics
        self._limit = limit
        self._version: int | None = None  # while watching

    def open(self, version: int) -> None:
        """From here on the trainer's weights are those of `version`, which the engine generates with."""
        self._version = version

    def close(self) -> None:
        """The trainer's weights are about to change, or the step's rows have been compared."""
        self._version = None

    def observe(self, rows: Any, logprobs: Tensor) -> None:
        """Compare the logprobs `[B, T]` of a forward pass over `rows` with those that came with them."""
        if self._version is None or not isinstance(rows, Rollout):
            return
        self.record(logprobs, rows.logprobs, rows.loss_mask & (rows.version == self._version)[:, None])

    def record(self, trainer: Tensor, engine: Tensor, mask: Tensor) -> None:
        """Compare logprobs `[B, T]` of equal weights where `mask` is true."""
        gap = (trainer.detach().double() - engine.double()).abs() * mask
        self._metrics.mean(GAP, gap.sum(), mask.sum())
        self._metrics.largest(LARGEST_GAP, gap.max() if gap.numel() else 0.0)

    def check(self, reduced: dict[str, float]) -> None:
        """Stop the run if the step's gap is above the limit.

        Raises:
            UserError: The engine did not generate with the trainer's weights.
        """
        found = reduced.get(GAP, 0.0)
        if not found <= self._limit:  # NaN is a gap too
            raise UserError(
                f"rollout and training logprobs differ by {found:.3g} on average, more than"
                f" `trainer.logprob_gap_limit` = {self._limit:g}: the rollout engine holds other weights than the"
                " trainer, or computes another model. Check the engine's version and dtype, or raise the limit"
            )


def default_gap_limit(dtype: torch.dtype) -> float:
    """1e-3 in float32 and float64, where a healthy gap is 1e-6; 0.05 in bfloat16, where one is 0.005 to 0.02.

    In float16, whose numbers have 3 more bits than bfloat16's, 0.01.
    """
    return {torch.bfloat16: 0.05, torch.float16: 0.01}.get(dtype, 1e-3)
