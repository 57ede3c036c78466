"""What a run kept of a node's inputs, read back into a step of one process, and compared with what the run made."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from rlflow.checkpoint.kept_rows import of_ranks, read_rows
from rlflow.controller.in_step import InStep
from rlflow.controller.inputs import EACH, FAILED, MADE, STATE, key_of
from rlflow.controller.program import Program
from rlflow.databuffer.kept import Kept, KeptValue
from rlflow.databuffer.rows import NUMBERS, ROOT, RowSpace
from rlflow.errors import UserError
from rlflow.state.tensors import with_tensors
from rlflow.storage.draft import of_rank
from rlflow.values.absent import Absent
from rlflow.values.columns import columns
from rlflow.values.cuts import Cut
from rlflow.values.host_copy import on_host
from rlflow.values.layout import Layout
from rlflow.values.ragged import Ragged


@dataclass(frozen=True)
class StoredInputs:
    """What was kept of one node in one step.

    Attributes:
        folder: Of the step.
        node: Its id.
        draw: Of prompts, that it ran at.
        failed: What it raised, by rank.
        ranks: That ran it.
        there: Those whose rows were written.
        described: How the rows lie, of these ranks.
    """

    folder: Path
    node: str
    draw: int
    failed: dict[int, str]
    ranks: tuple[int, ...]
    there: tuple[int, ...]
    described: dict[str, Any]

    @classmethod
    def read(cls, folder: Path, node: str) -> StoredInputs:
        """Look at what is there.

        Raises:
            UserError: Nothing whole is.
        """
        found = json.loads((folder / f"{node}.json").read_text())
        ranks = tuple(next(iter(found["spaces"].values()))["dealt"][0][0]["ranks"])
        there = tuple(rank for rank in ranks if (folder / f"{of_rank(node, rank, found['ranks'])}.json").is_file())
        if not there:
            raise UserError(f"{folder} has no rows of node `{node}`: the run was killed while it wrote them")
        files = {rank: folder / f"{of_rank(f'{node}.{FAILED}', rank, found['ranks'])}.txt" for rank in ranks}
        failed = {rank: file.read_text() for rank, file in files.items() if file.is_file()}
        return cls(folder, node, found["draw"], failed, ranks, there, of_ranks(found, there))

    def state(self) -> dict[str, Any]:
        """The module's, before the call."""
        path = self.folder / f"{self.node}.{STATE}"
        return with_tensors(json.loads(Path(f"{path}.json").read_text()), load_file(f"{path}.safetensors"))

    def put(self, program: Program, layout: Layout, now: InStep, device: torch.device) -> None:
        """Give a step of one process what the node reads, the rows of all ranks in the order of their paths."""
        graph, node = program.graph, program.graph.nodes[self.node]
        if missing := sorted({*self.described["values"]} ^ {*node.reads}):
            raise UserError(
                f"{self.folder} has what an earlier `{self.node}` read, and `{missing[0]}` is read by one of the two"
                " alone; replay with the algorithm of the run"
            )
        values = {name: KeptValue(graph.type_of(name), key_of(graph, node, name), layout, None) for name in node.reads}
        kept = self._rows(self.node, self.described, values, program, layout, now.step, device)
        now.spaces |= {key.removeprefix(EACH): space for key, space in kept.spaces.items()}
        for name, value in kept.values.items():
            now.buffer.put(name, value.rows, value.annotation, kept.spaces[value.space], layout)
            if name in node.each:
                now.buffer.issue(name, layout, now.spaces[node.inside])

    def made(self, program: Program, layout: Layout, step: int, device: torch.device) -> tuple[Any, RowSpace] | None:
        """What the node returned in the run, and its rows; None where that was not kept."""
        name, node = f"{self.node}.{MADE}", program.graph.nodes[self.node]
        if not (self.folder / f"{name}.json").is_file():
            return None
        described = json.loads((self.folder / f"{name}.json").read_text())
        (key,) = described["spaces"]
        values = {self.node: KeptValue(node.returns, key, layout, None)}
        kept = self._rows(name, described, values, program, layout, step, device)
        return kept.values[self.node].rows, kept.spaces[key]

    def _rows(
        self,
        name: str,
        described: dict[str, Any],
        values: dict[str, KeptValue],
        program: Program,
        layout: Layout,
        step: int,
        device: torch.device,
    ) -> Kept:
        spaces = {}
        for key in described["spaces"]:
            levels = program.graph.levels(key.removeprefix(EACH))
            none = torch.empty(len(levels) + len(NUMBERS), 0, dtype=torch.int64)
            shards = [none] * layout.shards
            spaces[key] = RowSpace.of_shards(levels[-1], layout, shards, above=levels[:-1] or ROOT)
        read = read_rows(self.folder, name, described, Kept(layout.ranks[0], spaces, values), device)
        in_step = {
            key: space.at(seed=program.seed, step=step, balance=program.balance) for key, space in read.spaces.items()
        }
        return Kept(read.rank, in_step, read.values)


def difference(here: Any, there: Any, annotation: Any, lengths: Tensor) -> float:
    """The largest difference of two values of this type; 0 where all is equal to the bit, infinite where it cannot be.

    Args:
        here: A value.
        there: Another, of as many rows.
        annotation: Its type.
        lengths: `[B]`, beyond which columns of tokens are padding.
    """
    largest = 0.0
    for column in columns(annotation):
        one, other = ((getattr(each, column.name) if column.name else each) for each in (here, there))
        if isinstance(one, Absent) or isinstance(other, Absent) or column.cut is Cut.PATH:
            continue
        if column.cut is Cut.TOKEN:
            held = torch.arange(int(lengths.max()) if len(lengths) else 0) < lengths[:, None]
            one, other = (on_host(each)[:, : held.shape[1]][held] for each in (one, other))
        if isinstance(one, dict) and one.keys() != other.keys():
            return float("inf")
        pairs = list(_tensors(one, other))
        if not pairs and one != other:
            return float("inf")
        largest = max([largest, *(_apart(*pair) for pair in pairs)])
    return largest


def _tensors(one: Any, other: Any) -> Iterator[tuple[Tensor, Tensor]]:
    if isinstance(one, Ragged):
        yield on_host(one.lengths), on_host(other.lengths)
        yield on_host(one.values), on_host(other.values)
    elif isinstance(one, dict):
        yield from ((on_host(one[name]), on_host(other[name])) for name in one)
    elif isinstance(one, Tensor):
        yield on_host(one), on_host(other)


def _apart(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    if not one.is_floating_point():
        return 0.0 if torch.equal(one, other) else float("inf")
    differs = one.ne(other) & ~(one.isnan() & other.isnan())
    apart = (one.double() - other.double())[differs].abs()
    return float(apart.where(~apart.isnan(), math.inf).max()) if len(apart) else 0.0  # NaN where one alone is
