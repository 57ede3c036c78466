"""Groups that are kept for later: their rows and values, chosen and joined without asking other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlflow.databuffer.rows import RowSpace
from rlflow.values.columns import join_rows, take_rows, trim
from rlflow.values.layout import Layout


@dataclass(frozen=True)
class KeptValue:
    """A value that is read after the filter, where it was made.

    Attributes:
        annotation: Its type.
        space: The name of its rows.
        layout: Where it was made.
        rows: Those of this rank; None where it made none.
    """

    annotation: Any
    space: str
    layout: Layout
    rows: Any


@dataclass(frozen=True)
class Kept:
    """Whole groups, seen from one rank: row spaces by name, and values by name."""

    rank: int
    spaces: Mapping[str, RowSpace]
    values: Mapping[str, KeptValue]

    @property
    def roots(self) -> Tensor:
        """`[G]` int64, the ids of their prompts, ascending."""
        ids: Tensor = next(iter(self.spaces.values())).roots.unique()
        return ids

    def only(self, roots: Tensor) -> Kept:
        """What is here of these prompts and of all rows below them."""
        spaces = {name: space.of_roots(roots, self.layouts(name)) for name, space in self.spaces.items()}
        values = {}
        for name, value in self.values.items():
            before = self.spaces[value.space]
            kept = torch.isin(before.roots, roots)  # [N]
            here = kept[before.held(value.layout, self.rank)].nonzero()[:, 0]
            rows = None if value.rows is None else take_rows(value.rows, value.annotation, here)
            values[name] = replace(value, rows=rows)
        return Kept(self.rank, spaces, values).trimmed()

    @classmethod
    def joined(cls, parts: Sequence[Kept]) -> Kept:
        """The groups of all parts."""
        first = parts[0]
        spaces = {
            name: RowSpace.joined([part.spaces[name] for part in parts], first.layouts(name)) for name in first.spaces
        }
        values = {}
        for name, value in first.values.items():
            each = [part.values[name] for part in parts]
            rows = None if value.rows is None else join_rows([part.rows for part in each], value.annotation)
            values[name] = replace(value, rows=rows)
        return cls(first.rank, spaces, values)

    def layouts(self, space: str) -> list[Layout]:
        """Where rows of a space lie: where they were made, and where values of them were."""
        of_values = (value.layout for value in self.values.values() if value.space == space)
        return list(dict.fromkeys([self.spaces[space].home[0], *of_values]))

    def trimmed(self) -> Kept:
        """Values as wide as their longest row here: a function of their rows, however these came together."""
        values = dict(self.values)
        for name, value in self.values.items():
            space = self.spaces[value.space]
            here = space.lengths[space.held(value.layout, self.rank)]
            longest = int(here.max()) if len(here) else 0
            if value.rows is not None:
                values[name] = replace(value, rows=trim(value.rows, value.annotation, longest))
        return replace(self, values=values)
