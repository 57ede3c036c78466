"""Several datasets as one: each has a name, a weight, and how its prompts are written."""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlflow.data.scripted_conversations import ScriptedConversations
from rlflow.data.sources import DataLike, Source, as_source
from rlflow.data.template import write_template
from rlflow.dotted_path import column_of
from rlflow.errors import UserError
from rlflow.rewards.reward import PROMPTS
from rlflow.values.response_settings import ResponseSettings, SamplingSettings

Shuffle = Callable[[Tensor, int, str], Tensor]


@dataclass(frozen=True)
class MixedDataset:
    """One dataset of a `Mixture`.

    Args:
        data: The rows, in any form that `PromptData` takes.
        weight: Share of the prompts, in proportion to the weights of the other datasets. Or a schedule of weights:
            points `[step, weight]`, with ascending steps from 0. Between two points the weight changes linearly; before
            the first point and after the last it is constant.
        prompt: Column that becomes the column `prompt`; dots step into a column. None if rows need no such change. If
            another dataset needs one, the column `question` of rows without a `prompt` becomes the column `prompt`.
        template: Text that becomes the column `prompt`. Columns are in braces: `{question} Answer with a number.`;
            `{prompt}` is the column `prompt`.
        max_response_length: Tokens after which responses to these prompts are cut, at most the module's own limit. None
            for the module's limit.
        sampling: Settings with which responses to these prompts are sampled. They replace the policy's temperature,
            `top_p`, `top_k` and `min_p`, and those of `trainer.val_sampling`. Losses are computed at the same
            temperature and over the same tokens. None for those settings.
    """

    data: DataLike
    weight: float | Sequence[tuple[int, float]] = 1.0
    prompt: str | None = None
    template: str | None = None
    max_response_length: int | None = None
    sampling: SamplingSettings | None = None

    def __post_init__(self) -> None:
        if self.max_response_length is not None and self.max_response_length < 1:
            raise UserError(f"`max_response_length` is {self.max_response_length}; it counts tokens, so give 1 or more")
        if not isinstance(self.weight, Sequence):
            if not 0 < self.weight < math.inf:
                raise UserError(f"`weight` is {self.weight}; give more than 0, or leave the dataset out")
            return
        shown = [list(point) for point in self.weight]
        if any(len(point) != 2 for point in shown):
            raise UserError(f"`weight` is {shown}; give a number, or points `[step, weight]`")
        steps, weights = [step for step, _ in shown], [weight for _, weight in shown]
        if any(step != int(step) or step < 0 for step in steps) or sorted(set(steps)) != steps:
            raise UserError(f"`weight` has points at the steps {steps}; give each a later step than the one before")
        if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
            raise UserError(
                f"`weight` has the weights {weights}; give 0 or more, and more than 0 at some step, or leave the"
                " dataset out"
            )

    @property
    def points(self) -> Sequence[tuple[int, float]]:
        """The weight as a schedule."""
        return self.weight if isinstance(self.weight, Sequence) else [(0, self.weight)]

    def weight_at(self, step: int) -> float:
        """The weight in this step, from 0."""
        steps, weights = [at for at, _ in self.points], [weight for _, weight in self.points]
        return float(np.interp(step, steps, weights))


class Mixture(Source):
    """Several datasets as one. A column of each row has the name of its dataset; `ByDataset` chooses the reward by it.

    In training, prompts are drawn in proportion to the weights, evenly spread: with weights 2 and 1, a step of 6
    prompts has 4 of the first dataset and 2 of the second. Each dataset is read in its own order, pass after pass. So a
    small dataset with a large weight is read several times while another is read once. An epoch has as many prompts as
    all datasets have rows together. A validation takes all rows of all datasets, and ignores weights.

    Weights may change from step to step, see `MixedDataset`. After any step, a dataset has then had as many prompts as
    its shares of all steps add up to, give or take two. Passes and the length of an epoch are as above.

    Args:
        datasets: The datasets by name: a `MixedDataset`, or only its rows if it needs no settings.
        column: Column that gets the name of the dataset.
    """

    def __init__(self, datasets: Mapping[str, MixedDataset | DataLike], column: str = "dataset") -> None:
        if not datasets:
            raise UserError("`datasets` is empty; name at least one")
        if wrong := [name for name in datasets if not name.replace("-", "_").replace(".", "_").isidentifier()]:
            raise UserError(
                f"`datasets` has the name {wrong[0]!r}, and names of metrics contain it; use letters and digits"
            )
        self.datasets = {
            name: each if isinstance(each, MixedDataset) else MixedDataset(each) for name, each in datasets.items()
        }
        self.column = column
        self.name = f"mixture of {', '.join(datasets)}"
        self.names = tuple(datasets)
        self._sources = [as_source(each.data, f"datasets.{name}") for name, each in self.datasets.items()]
        if scripted := [
            name
            for name, source in zip(datasets, self._sources, strict=True)
            if isinstance(source, ScriptedConversations)
        ]:
            raise UserError(
                f"`datasets.{scripted[0]}` has scripted conversations, and the form of their calls is checked only if"
                " they are the whole training data; train on them alone"
            )
        # By the prompts of a step: the sums of shares so far, and the prompts before each step.
        self._known: dict[int, tuple[list[float], list[list[int]]]] = {}
        points = {step for each in self.datasets.values() for step, _ in each.points}
        for step in sorted(points):
            if not any(each.weight_at(step) for each in self.datasets.values()):
                raise UserError(f"all datasets have the weight 0 at step {step}; raise one of them")

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
        """A digest of the digests of all datasets; None if one has none."""
        digests = [source.digest() for source in self._sources]
        if None in digests:
            return None
        written = [(name, each.prompt, each.template) for name, each in self.datasets.items()]
        return hashlib.sha256(json.dumps([self.column, written, digests]).encode()).hexdigest()

    def masks(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """For each dataset by name, which of these rows belong to it: `[N]` bool."""
        return {
            name: torch.tensor([row.get(self.column) == name for row in rows], dtype=torch.bool) for name in self.names
        }

    @property
    def settings(self) -> dict[str, ResponseSettings]:
        """The response settings of each dataset, by name."""
        return {name: ResponseSettings(each.max_response_length, each.sampling) for name, each in self.datasets.items()}

    def own_settings(self, rows: Sequence[Mapping[str, Any]]) -> list[ResponseSettings]:
        """The response settings from the dataset of each of these rows."""
        settings = self.settings
        return [settings.get(str(row.get(self.column)), ResponseSettings()) for row in rows]

    def split(self, rows: Tensor) -> list[Tensor]:
        """These rows `[N]` int64, ascending, by dataset."""
        ends = torch.searchsorted(rows, torch.tensor(self._ends))
        return list(rows.tensor_split(ends[:-1]))

    def drawn(self, rows: Tensor, epoch: int, shuffle: Shuffle, per_step: int) -> Tensor:
        """The rows of an epoch in their order, `[N]` int64: as many as there are rows.

        Where weights have a schedule, those that fill no step are left out.

        Args:
            rows: `[N]` int64, ascending, the rows to draw from.
            epoch: Epoch, from 0. In each dataset it begins where the previous epoch ended.
            shuffle: Function of a dataset's rows, the number of the pass over them and the dataset's name, which
                returns them in the order of this pass.
            per_step: Prompts of a step.

        Raises:
            UserError: A dataset has no row to draw from, or its weight is too small for one.
        """
        steps = max(1, len(rows) // per_step)
        if self.is_scheduled:
            taken = self._taken((epoch + 1) * steps, per_step)[epoch * steps :]
        else:
            counts = apportioned([each.weight_at(0) for each in self.datasets.values()], len(rows))
            taken = [[number * count for count in counts] for number in (epoch, epoch + 1)]
        parts = []
        for which, (name, of) in enumerate(zip(self.names, self.split(rows), strict=True)):
            first, *ends = [of_all[which] for of_all in taken]
            if not len(of) or (first == ends[-1] and not self.is_scheduled):
                why = (
                    "has no rows" if not len(of) else f"gets none of the {len(rows)} prompts of an epoch by its weight"
                )
                raise UserError(f"dataset `{name}` of the mixture {why}; leave it out, or raise its weight")
            passes = [shuffle(of, number, name) for number in range(first // len(of), (ends[-1] - 1) // len(of) + 1)]
            of_epoch = torch.cat([of[:0], *passes])[first % len(of) :][: ends[-1] - first]
            parts.append(of_epoch.split([end - start for start, end in pairwise([first, *ends])]))
        return torch.cat([interleaved(of_step) for of_step in zip(*parts, strict=True)])

    @property
    def writes_prompts(self) -> bool:
        """Whether it writes the column `prompt` of some rows, so that prompts are read from it."""
        return any(each.prompt is not None or each.template is not None for each in self.datasets.values())

    @property
    def is_scheduled(self) -> bool:
        """Whether weights change from step to step."""
        return any(len(each.points) > 1 for each in self.datasets.values())

    def _taken(self, steps: int, per_step: int) -> list[list[int]]:
        """The number of prompts drawn from each dataset before each step, up to `steps`.

        A step is divided by each dataset's deficit from the sum of its shares, so roundings do not add up.
        """
        datasets = self.datasets.values()
        due, known = self._known.get(per_step, ([0.0] * len(datasets), [[0] * len(datasets)]))
        taken = [*known]  # another thread may read what is known
        for step in range(len(taken) - 1, steps):
            weights = [each.weight_at(step) for each in datasets]
            due = [before + weight / sum(weights) * per_step for before, weight in zip(due, weights, strict=True)]
            lacking = [max(0.0, all_ - before) for all_, before in zip(due, taken[-1], strict=True)]
            counts = apportioned(lacking, per_step)
            taken.append([before + count for before, count in zip(taken[-1], counts, strict=True)])
        self._known[per_step] = due, taken
        return taken[: steps + 1]

    @cached_property
    def _ends(self) -> list[int]:
        """For each dataset the rows up to its end."""
        lengths = [len(source) for source in self._sources]
        if 0 in lengths:
            raise UserError(f"`datasets.{self.names[lengths.index(0)]}` has no rows; leave it out, or check its data")
        return [*accumulate(lengths)]

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
        if each.prompt is not None:
            row["prompt"] = column_of(row, each.prompt, place)
        elif each.template is None and self.writes_prompts and (there := [name for name in PROMPTS if name in row]):
            row["prompt"] = row[there[0]]
        if each.template is not None:
            own = row.get("prompt")
            if not isinstance(own, str | None):
                raise UserError(
                    f"{place}: the prompt is a list of messages, into which no `template` writes; leave it out"
                )
            row["prompt"] = write_template(each.template, own, row, place)
        return row


def settings_of(source: Any) -> dict[str, ResponseSettings]:
    """The response settings of each dataset of a mixture, by name; empty for another source."""
    return source.settings if isinstance(source, Mixture) else {}


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
