"""What a rank holds of a tensor that ranks divide among them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TensorRange:
    """A contiguous range of a flattened tensor, on the rank that holds it.

    Attributes:
        start: Its first element's place in the flattened whole.
        values: `[n]`, the elements, a view of where they are held; may be empty.
    """

    start: int
    values: Tensor
