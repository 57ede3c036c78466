"""Several datasets as one: each has a name, a weight, and how its prompts are written."""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.data.played import Played
from rlflow.data.sources import DataLike, Source, as_source
from rlflow.data.template import write_template
from rlflow.dotted_path import column_of
from rlflow.errors import UserError

Shuffle = Callable[[Tensor, int, str], Tensor]


@dataclass(frozen=True)
class MixedDataset:
    """One dataset of a `Mixture`.

    Args:
        data: The rows, in any form that `PromptData` takes.
        weight: Its share of the prompts, in proportion to the weights of the others.
        prompt: Column that becomes the column `prompt`; dots step into a column. None where rows are as they should be.
        template: Text that becomes the column `prompt`, with columns in braces, `{question} Answer with a number.`;
            `{prompt}` is the column `prompt`.
    """

    data: DataLike
    weight: float = 1.0
    prompt: str | None = None
    template: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise UserError(f"`weight` is {self.weight}; give more than 0, or leave the dataset out")


class Mixture(Source):
    """Several datasets as one. A row has its dataset's name in a column, by which `ByDataset` chooses the reward.

    To train on, datasets are drawn in proportion to their weights, evenly spread: with weights 2 and 1, a step of 6
    prompts has 4 of the first and 2 of the second. Each is passed over in an order of its own, again and again, so a
    small one with a large weight comes several times in the time in which another is passed once. An epoch is as many
    prompts as there are rows in all. To validate on, all rows of all datasets are taken, and weights do not matter.

    Args:
        datasets: The datasets by name; what has no settings is given as it would be without the others.
        column: Column of the name.
    """

    def __init__(self, datasets: Mapping[str, MixedDataset | DataLike], column: str = "dataset") -> None:
        if not datasets:
            raise UserError("`datasets` is empty; name at least one")
        if wrong := [name for name in datasets if not name.replace("-", "_").replace(".", "_").isidentifier()]:
            raise UserError(
                f"`datasets` has the name {wrong[0]!r}, and metrics have it in theirs; use letters and digits"
            )
        self.datasets = {
            name: each if isinstance(each, MixedDataset) else MixedDataset(each) for name, each in datasets.items()
        }
        self.column = column
        self.name = f"mixture of {', '.join(datasets)}"
        self.names = tuple(datasets)
        self._sources = [as_source(each.data, f"datasets.{name}") for name, each in self.datasets.items()]
        if played := [name for name, source in zip(datasets, self._sources, strict=True) if isinstance(source, Played)]:
            raise UserError(
                f"`datasets.{played[0]}` has conversations that were played, whose form of calls is checked only where"
                " they are all that is trained on; train on them alone"
            )

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.read([row])[0]

    def read(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        for which, source in enumerate(self._sources):
            mine = sorted({row for row in rows if self._place(row)[0] == which})
            for row, value in zip(mine, source.read([self._place(row)[1] for row in mine]), strict=True):
                found[row] = self._written(value, which, row)
        return [found[row] for row in rows]

    def where(self, row: int) -> str:
        which, place = self._place(row)
        return self._sources[which].where(place)

    def folder(self, row: int) -> Path | None:
        which, place = self._place(row)
        return self._sources[which].folder(place)

    def digest(self) -> str | None:
        """A digest of those of all datasets; None where one has none."""
        digests = [source.digest() for source in self._sources]
        if None in digests:
            return None
        written = [(name, each.prompt, each.template) for name, each in self.datasets.items()]
        return hashlib.sha256(json.dumps([self.column, written, digests]).encode()).hexdigest()

    def masks(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """For each dataset by name, which of these rows are of it: `[N]` bool."""
        return {
            name: torch.tensor([row.get(self.column) == name for row in rows], dtype=torch.bool) for name in self.names
        }

    def split(self, rows: Tensor) -> list[Tensor]:
        """These rows `[N]` int64, ascending, by dataset."""
        ends = torch.searchsorted(rows, torch.tensor(self._ends))
        return list(rows.tensor_split(ends[:-1]))

    def drawn(self, rows: Tensor, epoch: int, shuffle: Shuffle) -> Tensor:
        """The rows of an epoch in their order, as many as there are rows: `[N]` int64.

        Args:
            rows: `[N]` int64, ascending, the rows to draw from.
            epoch: Epoch, from 0. It goes on where the one before ended in each dataset.
            shuffle: Function of a dataset's rows, the number of the pass over them and the dataset's name, which
                returns them in the order of this pass.

        Raises:
            UserError: A dataset has no row to draw from, or its weight is too small for one.
        """
        counts = apportioned([each.weight for each in self.datasets.values()], len(rows))
        parts = []
        for name, of, count in zip(self.names, self.split(rows), counts, strict=True):
            if not len(of) or not count:
                why = (
                    "has no rows" if not len(of) else f"gets none of the {len(rows)} prompts of an epoch by its weight"
                )
                raise UserError(f"dataset `{name}` of the mixture {why}; leave it out, or raise its weight")
            first, end = epoch * count, (epoch + 1) * count
            passes = [shuffle(of, number, name) for number in range(first // len(of), (end - 1) // len(of) + 1)]
            start = first % len(of)
            parts.append(torch.cat(passes)[start : start + count])
        return interleaved(parts)

    @cached_property
    def _ends(self) -> list[int]:
        """For each dataset the rows up to its end."""
        return [*accumulate(map(len, self._sources))]

    def _place(self, row: int) -> tuple[int, int]:
        """The dataset of a row, by number, and the row's place in it."""
        which = bisect_right(self._ends, row)
        return which, row - (self._ends[which - 1] if which else 0)

    def _written(self, row: dict[str, Any], which: int, number: int) -> dict[str, Any]:
        name, place = self.names[which], self.where(number)
        each = self.datasets[name]
        if row.get(self.column, name) != name:
            raise UserError(
                f"{place} has a column `{self.column}` already, {row[self.column]!r:.60}, in which the mixture writes"
                " the dataset's name; set its `column` to another name"
            )
        row = {**row, self.column: name}
        column = partial(column_of, row, place=place)
        if each.prompt is not None:
            row["prompt"] = column(each.prompt)
        if each.template is not None:
            own = row.get("prompt", "")
            if not isinstance(own, str):
                raise UserError(
                    f"{place}: the prompt is a list of messages, into which no `template` writes; leave it out"
                )
            row["prompt"] = write_template(each.template, own, column)
        return row


def apportioned(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers in proportion to weights, by largest remainders, that add up to `total`: 10 by 2 and 1 is 7, 3."""
    exact = [weight / sum(weights) * total for weight in weights]
    counts = [int(each) for each in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def interleaved(parts: Sequence[Tensor]) -> Tensor:
    """Rows of several datasets in one order, each spread evenly over it: a0 a1 a2 a3 and b0 b1 as a0 b0 a1 a2 b1 a3."""
    times = torch.cat([(torch.arange(len(part), dtype=torch.float64) + 0.5) / max(1, len(part)) for part in parts])
    return torch.cat(list(parts))[times.argsort(stable=True)]
