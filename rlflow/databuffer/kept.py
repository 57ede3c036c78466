"""Groups that are kept for later: their rows and values, chosen and joined without asking other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlflow.databuffer.rows import RowSpace, ids_in_order
from rlflow.values.columns import join_rows, take_rows, trim
from rlflow.values.layout import Layout


@dataclass(frozen=True)
class KeptValue:
    """A value that is read after the filter, where it was made.

    Attributes:
        annotation: Its type.
        space: The name of its rows.
        layout: Where it was made.
        lengths: `[N]`, where `PerToken` columns of all its rows are cut.
        rows: Those of this rank; None where it made none.
    """

    annotation: Any
    space: str
    layout: Layout
    lengths: Tensor
    rows: Any


@dataclass(frozen=True)
class Kept:
    """Whole groups, seen from one rank: row spaces by name, and values by name."""

    rank: int
    spaces: Mapping[str, RowSpace]
    values: Mapping[str, KeptValue]

    @property
    def groups(self) -> Tensor:
        """`[G]` int64, their ids, ascending; each has rows in every space."""
        ids: Tensor = next(iter(self.spaces.values())).groups.unique()
        return ids

    def only(self, groups: Tensor) -> Kept:
        """What is here of these groups."""
        spaces = {name: space.of_groups(groups, self.layouts(name)) for name, space in self.spaces.items()}
        values = {}
        for name, value in self.values.items():
            before = self.spaces[value.space]
            kept = torch.isin(before.groups, groups)  # [N]
            here = kept[before.held(value.layout, self.rank)].nonzero()[:, 0]
            rows = None if value.rows is None else take_rows(value.rows, value.annotation, here)
            values[name] = replace(value, rows=rows, lengths=value.lengths[kept])
        return Kept(self.rank, spaces, values).trimmed()

    @classmethod
    def joined(cls, parts: Sequence[Kept]) -> Kept:
        """The groups of all parts."""
        first = parts[0]
        order = {name: ids_in_order([part.spaces[name] for part in parts]) for name in first.spaces}
        spaces = {
            name: RowSpace.joined([part.spaces[name] for part in parts], first.layouts(name)) for name in first.spaces
        }
        values = {}
        for name, value in first.values.items():
            each = [part.values[name] for part in parts]
            rows = None if value.rows is None else join_rows([part.rows for part in each], value.annotation)
            lengths = torch.cat([part.lengths for part in each])[order[value.space]]
            values[name] = replace(value, rows=rows, lengths=lengths)
        return cls(first.rank, spaces, values)

    def layouts(self, space: str) -> list[Layout]:
        """Where rows of a space lie: where they were made, and where values of them were."""
        of_values = (value.layout for value in self.values.values() if value.space == space)
        return list(dict.fromkeys([self.spaces[space].home[0], *of_values]))

    def trimmed(self) -> Kept:
        """Values as wide as their longest row here: a function of their rows, however these came together."""
        values = dict(self.values)
        for name, value in self.values.items():
            here = value.lengths[self.spaces[value.space].held(value.layout, self.rank)]
            longest = int(here.max()) if len(here) else 0
            if value.rows is not None:
                values[name] = replace(value, rows=trim(value.rows, value.annotation, longest))
        return replace(self, values=values)
