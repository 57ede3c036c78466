"""The gap between rollout and training logprobs: the alarm for stale or wrong weights in the rollout engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.metrics import StepMetrics
from rlflow.values.rollout import Rollout

GAP = "sync/logprob_gap"  # of the one policy; of several each by its name, `sync/logprob_gap/solver`
LARGEST_GAP = "sync/logprob_gap_max"


class LogprobGap:
    """Compares what the engine said of its tokens with what the trainer says, at equal weights.

    It watches the followed role's forward passes from the rollout until that role's first update, and takes the first
    over each of this rank's rows; of these, rows that other weights generated do not count.

    Args:
        limit: Largest mean |logprob - rollout logprob| over all tokens of a step; above it the run stops.
        policy: Its name, where there are several.
        made_by: The nodes whose rows this policy alone generates; None for all rows.
    """

    def __init__(self, limit: float, policy: str = "", made_by: Collection[str] | None = None) -> None:
        self._limit = limit
        self._policy = policy
        self._made_by = made_by
        suffix = f"/{policy}" if policy else ""
        self._mean, self._largest = GAP + suffix, LARGEST_GAP + suffix
        self._metrics: StepMetrics | None = None
        self._version: int | None = None  # while watching
        self._compared = False  # whether a number was taken since `open`

    def open(self, version: int, metrics: StepMetrics) -> None:
        """From here on the trainer's weights are those of `version`, which the engine generates with.

        Args:
            version: Of the weights.
            metrics: Of the step whose rows are compared.
        """
        self._version, self._metrics, self._compared = version, metrics, False

    def close(self) -> None:
        """The trainer's weights are about to change, or the step's rows have been compared."""
        self._version = None

    def close_if_compared(self) -> None:
        """A node has scored rows: those that are compared, or others of which nothing is known."""
        if self._compared:
            self.close()

    def observe(self, rows: Any, logprobs: Tensor) -> None:
        """Compare the logprobs `[B, T]` of a forward pass over `rows` with those that came with them."""
        if self._version is None or self._metrics is None or not isinstance(rows, Rollout):
            return
        if self._made_by is not None and rows.path.levels[-1] not in self._made_by:
            return
        self._compared = True
        self.record(self._metrics, logprobs, rows.logprobs, rows.loss_mask & (rows.version == self._version)[:, None])

    def record(self, metrics: StepMetrics, trainer: Tensor, engine: Tensor, mask: Tensor) -> None:
        """Compare logprobs `[B, T]` of equal weights where `mask` is true."""
        gap = (trainer.detach().double() - engine.double()).abs() * mask
        metrics.mean(self._mean, gap.sum(), mask.sum())
        metrics.largest(self._largest, gap.max() if gap.numel() else 0.0)

    def check(self, reduced: Mapping[str, float]) -> None:
        """Stop the run if the step's gap is above the limit.

        Raises:
            UserError: The engine did not generate with the trainer's weights.
        """
        found = reduced.get(self._mean, 0.0)
        of = f" of `{self._policy}`" if self._policy else ""
        if not found <= self._limit:  # NaN is a gap too
            raise UserError(
                f"rollout and training logprobs{of} differ by {found:.3g} on average, more than"
                f" `trainer.logprob_gap_limit` = {self._limit:g}: the rollout engine holds other weights than the"
                " trainer, or computes another model. Check the engine's version and dtype, or raise the limit"
            )


def default_gap_limit(dtype: torch.dtype) -> float:
    """1e-3 in float32 and float64, where a healthy gap is 1e-6; 0.05 in bfloat16, where one is 0.005 to 0.02.

    In float16, whose numbers have 3 more bits than bfloat16's, 0.01.
    """
    return {torch.bfloat16: 0.05, torch.float16: 0.01}.get(dtype, 1e-3)
