"""Groups that are carried over to a later step: their rows and values, chosen and joined without communication."""

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
    """A value of groups, in the layout in which it was made.

    Attributes:
        annotation: Type of the value.
        space: Name of its row space.
        layout: Layout in which it was made.
        rows: Rows of this rank; None on ranks outside the layout.
    """

    annotation: Any
    space: str
    layout: Layout
    rows: Any


@dataclass(frozen=True)
class Groups:
    """Whole groups, seen from one rank: prompts with all rows below them, and values of these rows.

    A space has all rows; a value has only the rows that this rank made. Here are two groups of two samples, as rank 1
    has them, which generated the samples of the second prompt:

        spaces["batch"].path      [[4], [7]]
        spaces["rollout"].path    [[4, 0], [4, 1], [7, 0], [7, 1]]
        spaces["rollout"].lengths [12, 3, 9, 12]
        values["rollout"].rows    Rollout of the rows [7, 0] and [7, 1]

        only(tensor([7]))         the second group; on rank 0 its spaces, and no rows of its values

    Attributes:
        rank: Rank of this process.
        spaces: Row spaces by name. Each has partitions for the layouts of its values, and for the one in which its rows
            were made.
        values: Values by name.
    """

    rank: int
    spaces: Mapping[str, RowSpace]
    values: Mapping[str, GroupValue]

    @property
    def roots(self) -> Tensor:
        """`[G]` int64, the ids of the groups' prompts, ascending."""
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
        """The layouts of a space: first that in which its rows were made, then those in which its values were made."""
        of_values = (value.layout for value in self.values.values() if value.space == space)
        return list(dict.fromkeys([self.spaces[space].origin[0], *of_values]))

    def trimmed(self) -> Groups:
        """The groups with each value cut to its longest row on this rank: its width then depends on its rows alone."""
        values = dict(self.values)
        for name, value in self.values.items():
            space = self.spaces[value.space]
            here = space.lengths[space.held(value.layout, self.rank)]
            longest = int(here.max()) if len(here) else 0
            if value.rows is not None:
                values[name] = replace(value, rows=trim(value.rows, value.annotation, longest))
        return replace(self, values=values)


# Takes the name under which groups were stored, and this run's groups without rows; returns the groups, None for none.
ReadGroups = Callable[[str, Groups], Groups | None]


def space_without_rows(levels: Sequence[str], layout: Layout) -> RowSpace:
    """An empty row space with these levels, prompts first."""
    none = torch.empty(len(levels) + len(NUMBERS), 0, dtype=torch.int64)
    return RowSpace.of_shards(levels[-1], layout, [none] * layout.shards, tuple(levels[:-1]))
