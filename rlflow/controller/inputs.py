"""What nodes read and made in a step, kept so that `rlflow replay` can run them again.

step-00000007/advantages.json                          rows, what the node is, and why its inputs are kept
step-00000007/advantages-00000-of-00002.safetensors    rank 0's rows, in the form of `rlflow.checkpoint.kept_rows`
step-00000007/advantages-00000-of-00002.written.json   SHA-256 of the files that rank 0 wrote, by name
step-00000007/advantages.state.json, .safetensors      the module's own state before the call
step-00000007/advantages.made.json, ...                what it returned, likewise; none where it raised
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from rlflow.checkpoint import digest_of
from rlflow.checkpoint.kept_rows import described, write_rows
from rlflow.controller.failures import left_out
from rlflow.controller.in_step import InStep
from rlflow.controller.run import Run
from rlflow.dag.graph import Graph
from rlflow.dag.node import Node
from rlflow.databuffer.kept import Kept, KeptValue
from rlflow.databuffer.route import Partition
from rlflow.databuffer.rows import RowSpace, ancestors, beside_parents
from rlflow.errors import one_line, readable, shown
from rlflow.state.tensors import without_tensors
from rlflow.storage.draft import of_rank
from rlflow.storage.tensors import sha256
from rlflow.strategies.launcher import of_a_collective
from rlflow.values.layout import Layout

MADE = "made"
WRITTEN = "written"
STATE = "state"
FAILED = "failed"
EACH = "each "  # before the name of rows that a node reads as `Each`


@dataclass(frozen=True)
class NodeInputs:
    """Writes what one rank's nodes read.

    Attributes:
        folder: Of the run's inputs; None to keep nothing.
        steps: That are kept, from 1; of others, what a node read that raised.
        nodes: That are kept, by id; empty for all.
    """

    folder: Path | None
    steps: Collection[int] = ()
    nodes: Collection[str] = ()

    @contextmanager
    def around(self, node: Node, layout: Layout, now: InStep, run: Run, world_size: int) -> Iterator[NodeCall]:
        """Around the call of a node, whose inputs are written before it if they are asked for, else if it raises."""
        asked = now.step + 1 in self.steps and (not self.nodes or node.id in self.nodes)
        call = NodeCall(self.folder, node, layout, now, run, world_size, asked)
        if asked:
            call.write("")
        try:
            yield call
        except Exception as error:
            if not asked and self.folder is not None and not of_a_collective(error):
                with contextlib.suppress(Exception):  # the error that is here is the one to be reported
                    call.write(readable(shown(one_line(error))))
                    step = now.step + 1
                    error.add_note(
                        f"what it read is kept: rlflow replay {self.folder.parent} --step {step} --node {node.id}"
                    )
            raise


@dataclass(frozen=True)
class NodeCall:
    """A node's call, on this rank."""

    folder: Path | None
    node: Node
    layout: Layout
    now: InStep
    run: Run
    world_size: int
    asked: bool

    def write(self, failed: str) -> None:
        """Write what the node reads; `failed`: what it raised."""
        graph, node, now, rank = self.run.graph, self.node, self.now, self.run.rank
        spaces, values = {node.inside: self._laid(now.spaces[node.inside])}, {}
        for name in node.reads:
            reader = now.spaces[graph.seen_in(node, name)]
            rows = now.buffer.get(name, self.layout, reader)
            key = key_of(graph, node, name)
            if key not in spaces:
                of = now.spaces[graph.space_of(name)]
                below = None if key == of.name else beside_parents(ancestors(reader.path, of.path), self._at(reader))
                spaces[key] = self._laid(of, below)
            values[name] = KeptValue(graph.type_of(name), key, self.layout, rows)
        kept = Kept(rank, spaces, values)
        written = self._write(node.id, kept, {"draw": now.draw})
        if failed:
            name = of_rank(f"{node.id}.{FAILED}", rank, self.world_size)
            (self._folder / f"{name}.txt").write_text(failed)
        if rank == self.layout.ranks[0] or failed:
            rest, tensors = without_tensors(self.run.module.state_dict())
            path = self._folder / f"{node.id}.{STATE}"
            Path(f"{path}.json").write_text(json.dumps(rest))
            save_file(
                {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}, f"{path}.safetensors"
            )
            # Of ranks that raised each writes a state of its own over that of another.
            written += [] if failed else [f"{path.name}.json", f"{path.name}.safetensors"]
        self._sign(node.id, written)

    def made(self, result: Any, space: RowSpace) -> None:
        """Write what the node returned, if its inputs were asked for."""
        if self.asked and self.node.makes_value:
            value = KeptValue(self.node.returns, space.name, self.layout, result)
            kept = Kept(self.run.rank, {space.name: self._laid(space)}, {self.node.id: value})
            name = f"{self.node.id}.{MADE}"
            self._sign(name, self._write(name, kept, {}))

    @property
    def _folder(self) -> Path:
        assert self.folder is not None
        return folder_of(self.folder, self.now.step)

    def _write(self, name: str, kept: Kept, more: dict[str, Any]) -> list[str]:
        """The names of the files that no other rank writes."""
        self._folder.mkdir(parents=True, exist_ok=True)
        signature_of(self._folder, name, self.run.rank, self.world_size).unlink(missing_ok=True)
        written = write_rows(self._folder, name, kept, self.world_size)
        draft = self._folder / f"{name}.json.{self.run.rank}"  # of several ranks that write the same, one counts
        content = {**described(kept, self.world_size), **more}
        draft.write_text(json.dumps({"sha256": digest_of(content), **content}))
        os.replace(draft, self._folder / f"{name}.json")
        return written

    def _sign(self, name: str, written: Collection[str]) -> None:
        """Write the digests of files that are written and stay as they are."""
        signature = signature_of(self._folder, name, self.run.rank, self.world_size)
        signature.write_text(json.dumps({file: sha256(self._folder / file) for file in written}))

    def _at(self, space: RowSpace) -> Partition:
        return space.partition(self.layout)

    def _laid(self, space: RowSpace, partition: Partition | None = None) -> RowSpace:
        """The rows as they lie in the node's layout, and in no other; dropped are those that the node does not see."""
        at = self._at(space) if partition is None else partition
        out = left_out(space, self.node, self.now, self.run.graph)
        return RowSpace.known(
            space.name,
            space.arrays if out is None else {**space.arrays, "dropped": out},
            (self.layout, at),
            {self.layout: at},
            seed=space.seed,
            step=space.step,
            balance=space.balance,
            above=space.above,
        )


def folder_of(folder: Path, step: int) -> Path:
    """Where a step's inputs are, counted from 0."""
    return folder / f"step-{step + 1:08d}"


def signature_of(folder: Path, name: str, rank: int, world_size: int) -> Path:
    """Where the digests are of what a rank wrote under a name; none where the run was killed meanwhile."""
    return folder / f"{of_rank(name, rank, world_size)}.{WRITTEN}.json"


def key_of(graph: Graph, node: Node, value: str) -> str:
    """Under which name the rows of a value that a node reads are kept: its own rows, or all below each of them."""
    return f"{EACH}{graph.space_of(value)}" if value in node.each else graph.seen_in(node, value)
