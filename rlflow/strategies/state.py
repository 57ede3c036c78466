"""The state of training as checkpoints have it: each rank's parts of weights and of what the optimizer keeps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from rlflow.models.tensor_range import TensorRange

WEIGHT = "weight"


class StoredState(Protocol):
    """One role's state in a checkpoint, read range by range."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """What there is of each parameter: `WEIGHT`, and what the optimizer keeps once it has made an update."""

    def require(self, shapes: dict[str, torch.Size], kinds: Iterable[str]) -> None:
        """Refuse a state of another model or optimizer, before anything is read.

        Args:
            shapes: Of the trained parameters by Hugging Face name.
            kinds: What is needed of each: `weight`, and what the optimizer keeps, such as `exp_avg`.

        Raises:
            UserError: A parameter is missing, one too many or of another shape, or other things are kept of it.
        """

    def read(self, parameter: str, kind: str, start: int, length: int) -> Tensor:
        """`[length]`: a range of the flattened tensor, on the CPU."""


def share_of(part: TensorRange, place: int, count: int) -> TensorRange:
    """The share of one of `count` ranks that hold the same part: ranges as even as can be."""
    length = part.values.numel()
    first, end = place * length // count, (place + 1) * length // count
    return TensorRange(part.start + first, part.values[first:end])
