"""Types of nodes that work across levels: `Each` (all rows below), `NewRows` (new rows), `After` (after the updates).

`B` is the number of rows on this rank, `K` the number of all rows below them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import torch
from torch import Tensor

from rlflow.errors import UserError

T = TypeVar("T")


class OwnRows:
    """Marks a return type: the value has rows of its own, below those that the node sees."""


NewRows = Annotated[T, OwnRows]


def new_rows(annotation: Any) -> Any:
    """`NewRows` of a type that is known only at run time."""
    return Annotated[annotation, OwnRows]


@dataclass(frozen=True)
class After:
    """The type of a parameter that reads a train node. The node then runs after the updates, with the new weights."""


@dataclass(frozen=True)
class Each(Generic[T]):
    """For each row that a node reads, the values of all rows below it.

    A node that sees three questions reads the rewards of their answers; the second question has none:

        values     0.5 1.0 0.0 1.0 1.0
        counts     2 0 3
        parent     0 0 2 2 2
        mean()     0.75 0.0 0.67
        argmax()   1 -1 3

    Attributes:
        values: `K` rows: those below the first row in the order of their paths, then those below the second, and so on.
        counts: `[B]` int64, how many of the `K` rows are below each row; 0 where there is none.
    """

    values: T
    counts: Tensor

    @property
    def parent(self) -> Tensor:
        """`[K]` int64: for each of the `K` rows, the index among the `B` rows of the row above it."""
        return torch.arange(len(self.counts), device=self.counts.device).repeat_interleave(self.counts)

    def sum(self) -> Tensor:
        """`[B]`, the sum of the numbers below each row; 0 if a row has none."""
        x = self._numbers("sum")
        return self._added(x.double() if x.is_floating_point() else x.long()).to(_dtype(x))

    def mean(self) -> Tensor:
        """`[B]`, the mean of the numbers below each row; 0 if a row has none."""
        x = self._numbers("mean")
        return (self._added(x.double()) / self.counts.clamp(min=1)).to(_float(x))

    def max(self) -> Tensor:
        """`[B]`, the largest number below each row; 0 if a row has none."""
        return self._extreme("max", "amax")

    def min(self) -> Tensor:
        """`[B]`, the smallest number below each row; 0 if a row has none."""
        return self._extreme("min", "amin")

    def argmax(self) -> Tensor:
        """`[B]` int64, index into `values` of the largest number below each row (the first, if equal); -1 if none."""
        return self._first_at(self.max())

    def argmin(self) -> Tensor:
        """`[B]` int64, index into `values` of the smallest number below each row (the first, if equal); -1 if none."""
        return self._first_at(self.min())

    def _numbers(self, asked: str) -> Tensor:
        x = self.values
        if not isinstance(x, Tensor) or x.dim() != 1:
            found = f"shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise UserError(
                f"`{asked}` is of one number for each row, and these `values` are of {found}; read `Each[PerSample]`,"
                " or compute with `values` and `counts`"
            )
        return x

    def _added(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(self.counts)).index_add(0, self.parent, x)

    def _extreme(self, asked: str, reduction: str) -> Tensor:
        x = self._numbers(asked)
        x = x.to(_dtype(x))
        none = x.new_zeros(len(self.counts))
        return none.scatter_reduce(0, self.parent, x, reduction, include_self=False)

    def _first_at(self, extreme: Tensor) -> Tensor:
        assert isinstance(self.values, Tensor)
        parent, here = self.parent, torch.arange(len(self.values), device=self.counts.device)
        last = len(self.values)
        candidates = here.where(self.values.to(extreme.dtype) == extreme[parent], last)
        first = here.new_full((len(self.counts),), last).scatter_reduce(0, parent, candidates, "amin")
        return first.where(first < last, -1)


def _dtype(x: Tensor) -> torch.dtype:
    return torch.int64 if x.dtype == torch.bool else x.dtype


def _float(x: Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else torch.get_default_dtype()
