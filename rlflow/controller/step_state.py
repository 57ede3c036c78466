"""From a step in progress to rows and values that can be kept, and back into another step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from rlflow.dag.graph import Graph
from rlflow.dag.planner import Plan
from rlflow.databuffer.balance import Balance
from rlflow.databuffer.buffer import DataBuffer
from rlflow.databuffer.kept import Kept, KeptValue
from rlflow.databuffer.rows import NUMBERS, RowSpace
from rlflow.metrics import StepMetrics


@dataclass
class InStep:
    """The rows and values of a step in progress.

    Attributes:
        step: From 0.
        buffer: Its values.
        metrics: What this rank logs of it.
        spaces: Its rows by name, those that this rank has to do with.
        draw: The last of the draws of prompts that it was made of, from 0.
    """

    step: int
    buffer: DataBuffer
    metrics: StepMetrics
    spaces: dict[str, RowSpace] = field(default_factory=dict)
    draw: int = 0


class Keep(Protocol):
    """A `Keeping` of these rows and values, of a rank's graph and plan."""

    def __call__(self, spaces: Sequence[str], values: Sequence[str]) -> Keeping: ...


class Keeping:
    """Some values of a step, and the rows that they are of, seen from one rank.

    Args:
        graph: Of the module.
        plan: Of all ranks.
        rank: This one.
        spaces: The names of the rows.
        values: The names of the values.
        seed: Of the run.
        balance: Whether rows may move to even out tokens.
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        rank: int,
        spaces: Sequence[str],
        values: Sequence[str],
        *,
        seed: int,
        balance: Balance,
    ) -> None:
        self._graph = graph
        self._layouts = plan.layouts()
        self._rank = rank
        self._spaces = spaces
        self._values = values
        self._seed = seed
        self._balance = balance

    def of(self, now: InStep) -> Kept:
        """All of them that this rank knows the rows of; rows of values where they were made."""
        values = {}
        for name in self._values:
            layout, space = self._layouts[name], self._graph.space_of(name)
            if space in now.spaces:
                rows = now.buffer.get(name, layout) if self._rank in layout.ranks else None
                values[name] = KeptValue(self._graph.type_of(name), space, layout, rows)
        return Kept(self._rank, {name: now.spaces[name] for name in self._spaces if name in now.spaces}, values)

    def empty(self) -> Kept:
        """All of them, without rows."""
        layouts = {name: self._layouts[name] for name in self._spaces}
        spaces = {
            name: RowSpace.of_shards(name, layout, [_no_rows(len(levels))] * layout.shards, levels[:-1])
            for name, layout in layouts.items()
            if (levels := self._graph.levels(name))
        }
        values = {
            name: KeptValue(self._graph.type_of(name), self._graph.space_of(name), self._layouts[name], None)
            for name in self._values
        }
        return Kept(self._rank, spaces, values)

    def put(self, kept: Kept, now: InStep) -> None:
        """Give a step these rows and values in place of its own, as if it had made them itself."""
        for name, space in kept.spaces.items():
            now.spaces[name] = space.at(seed=self._seed, step=now.step, balance=self._balance)
        for name, value in kept.values.items():
            now.buffer.put(name, value.rows, value.annotation, now.spaces[value.space], value.layout)


def _no_rows(depth: int) -> torch.Tensor:
    """Of a shard of paths of this depth."""
    return torch.empty(depth + len(NUMBERS), 0, dtype=torch.int64)
