"""Groups that outlast their step: their rows and values, chosen and joined without asking other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlflow.databuffer.rows import NUMBERS, RowSpace
from rlflow.values.columns import join_rows, take_rows, trim
from rlflow.values.layout import Layout


@dataclass(frozen=True)
class GroupValue:
    """A value of groups, where it was made.

    Attributes:
        annotation: Type of the value.
        space: Name of its rows.
        layout: Layout in which it was made.
        rows: Rows of this rank; None where it made none.
    """

    annotation: Any
    space: str
    layout: Layout
    rows: Any


@dataclass(frozen=True)
class Groups:
    """Whole groups, seen from one rank: prompts with all rows below them, and values of these rows.

    All ranks know all rows; a value has the rows that this rank made. Two groups of two samples on two ranks, as rank 1
    sees them, which generated those of the second prompt:

        spaces["batch"].path      [[4], [7]]
        spaces["rollout"].path    [[4, 0], [4, 1], [7, 0], [7, 1]]
        spaces["rollout"].lengths [12, 3, 9, 12]
        values["rollout"].rows    Rollout of the rows [7, 0] and [7, 1]

        only(tensor([7]))         the second group: rank 0 keeps its space, and no row of its values

    Attributes:
        rank: This rank.
        spaces: Row spaces by name; each lies in the layouts of its values, in addition to that in which it was made.
        values: Values by name.
    """

    rank: int
    spaces: Mapping[str, RowSpace]
    values: Mapping[str, GroupValue]

    @property
    def roots(self) -> Tensor:
        """`[G]` int64, the ids of their prompts, ascending."""
        ids: Tensor = next(iter(self.spaces.values())).roots.unique()
        return ids

    def only(self, roots: Tensor) -> Groups:
        """The groups of these prompts, with all rows below them."""
        spaces = {name: space.of_roots(roots, self.layouts(name)) for name, space in self.spaces.items()}
        values = {}
        for name, value in self.values.items():
            before = self.spaces[value.space]
            chosen = torch.isin(before.roots, roots)  # [N]
            here = chosen[before.held(value.layout, self.rank)].nonzero()[:, 0]
            rows = None if value.rows is None else take_rows(value.rows, value.annotation, here)
            values[name] = replace(value, rows=rows)
        return Groups(self.rank, spaces, values).trimmed()

    @classmethod
    def joined(cls, parts: Sequence[Groups]) -> Groups:
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
        """The layouts in which rows of a space lie: where they were made, and where values of them were."""
        of_values = (value.layout for value in self.values.values() if value.space == space)
        return list(dict.fromkeys([self.spaces[space].home[0], *of_values]))

    def trimmed(self) -> Groups:
        """Values as wide as their longest row here: a function of their rows, however these came together."""
        values = dict(self.values)
        for name, value in self.values.items():
            space = self.spaces[value.space]
            here = space.lengths[space.held(value.layout, self.rank)]
            longest = int(here.max()) if len(here) else 0
            if value.rows is not None:
                values[name] = replace(value, rows=trim(value.rows, value.annotation, longest))
        return replace(self, values=values)


# Reads groups that were stored under a name, into the form of empty ones; None where nothing was.
ReadGroups = Callable[[str, Groups], Groups | None]


def space_without_rows(levels: Sequence[str], layout: Layout) -> RowSpace:
    """A space of rows of these levels, prompts first, without any."""
    none = torch.empty(len(levels) + len(NUMBERS), 0, dtype=torch.int64)
    return RowSpace.of_shards(levels[-1], layout, [none] * layout.shards, tuple(levels[:-1]))
