"""Stores the inputs and results of nodes in a step, so that `rlflow replay` can run the nodes again.

step-00000007/advantages.json                          the rows that the node sees, their layout, and the draw
step-00000007/advantages-00000-of-00002.safetensors    rank 0's rows, in the form of `rlflow.checkpoint.stored_groups`
step-00000007/advantages-00000-of-00002.written.json   SHA-256 of the files that rank 0 wrote, by name
step-00000007/advantages.state.json, .safetensors      the module's own state before the call
step-00000007/advantages.made.json, ...                the node's result in the same form; none if it raised
step-00000007/advantages.failed-00000-of-00002.txt     the error that the node raised on rank 0; none if it did not
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlflow.checkpoint import digest_of
from rlflow.checkpoint.stored_groups import described, of_ranks, read_rows, write_rows
from rlflow.controller.run import Run
from rlflow.controller.step import Step
from rlflow.dag.graph import Graph
from rlflow.dag.node import Node
from rlflow.databuffer.groups import Groups, GroupValue, space_without_rows
from rlflow.databuffer.route import Partition
from rlflow.databuffer.rows import RowSpace, ancestors, with_parents
from rlflow.databuffer.transport import of_a_collective
from rlflow.errors import UserError, one_line, readable, shown
from rlflow.state.tensors import with_tensors, without_tensors
from rlflow.storage.draft import of_rank
from rlflow.storage.safetensors_files import sha256
from rlflow.values.column_kinds import ColumnKind
from rlflow.values.columns import columns
from rlflow.values.host_copy import on_host
from rlflow.values.layout import Layout
from rlflow.values.not_sent import NotSent
from rlflow.values.ragged import Ragged

MADE = "made"
WRITTEN = "written"
STATE = "state"
FAILED = "failed"
EACH = "each "  # prefix of the names of rows that a node reads as `Each`


@dataclass(frozen=True)
class NodeInputs:
    """Stores the inputs of this rank's nodes, in the steps of `trainer.dump_steps` and whenever a node raises.

    Attributes:
        run: The run on this rank.
        folder: Folder of the run's inputs, with one folder for each step; None to write nothing.
        steps: Steps whose inputs and results are stored, from 1.
        nodes: Names of the nodes to which `steps` applies; empty for all.
    """

    run: Run
    folder: Path | None
    steps: Collection[int] = ()
    nodes: Collection[str] = ()

    @contextmanager
    def around(self, node: Node, layout: Layout, step: Step) -> Iterator[None]:
        """A context for the call of a node: writes its inputs before the call in a step of `steps`, else if it raises.

        A note on the error says how to replay the node: `rlflow replay runs/grpo --step 7 --node advantages`. Nothing
        is written if a collective failed, because the cause is on another rank.
        """
        asked = self._are_asked(node, step)
        if asked:
            self._write(node, layout, step)
        try:
            yield
        except Exception as error:
            if not asked and self.folder is not None and not of_a_collective(error):
                with contextlib.suppress(Exception):  # the node's own error is the one to report
                    self._write(node, layout, step, readable(shown(one_line(error))))
                    again = f"rlflow replay {self.folder.parent} --step {step.number + 1} --node {node.id}"
                    error.add_note(f"what it read is stored: {again}")
            raise

    def write_result(self, node: Node, layout: Layout, step: Step) -> None:
        """Write the result of the node, if `steps` and `nodes` include it."""
        if self._are_asked(node, step) and node.makes_value:
            space = step.buffer.space(node.id)
            value = GroupValue(node.returns, space.name, layout, step.buffer.get(node.id, layout))
            groups = Groups(self.run.rank, {space.name: self._laid(space, node, layout, step)}, {node.id: value})
            name = f"{node.id}.{MADE}"
            self._sign(step, name, self._write_groups(step, name, groups, {}))

    def _are_asked(self, node: Node, step: Step) -> bool:
        return step.number + 1 in self.steps and (not self.nodes or node.id in self.nodes)

    def _write(self, node: Node, layout: Layout, step: Step, failed: str = "") -> None:
        """Write the inputs of a node on this rank, and the module's state; `failed` is the error it raised, if any."""
        graph, rank, folder = self.run.graph, self.run.rank, self._folder(step)
        spaces, values = {node.inside: self._laid(step.spaces[node.inside], node, layout, step)}, {}
        for name in node.reads:
            reader = step.spaces[graph.seen_in(node, name)]
            rows = step.buffer.get(name, layout, reader)
            key = key_of(graph, node, name)
            if key not in spaces:
                of = step.spaces[graph.space_of(name)]
                below = None
                if key != of.name:
                    below = with_parents(ancestors(reader.path, of.path), reader.partition(layout))
                spaces[key] = self._laid(of, node, layout, step, below)
            values[name] = GroupValue(graph.type_of(name), key, layout, rows)
        written = self._write_groups(step, node.id, Groups(rank, spaces, values), {"draw": step.draw})
        if failed:
            name = of_rank(f"{node.id}.{FAILED}", rank, self.run.transport.world_size)
            (folder / f"{name}.txt").write_text(failed)
        if rank == layout.ranks[0] or failed:
            rest, tensors = without_tensors(self.run.module.state_dict())
            path = folder / f"{node.id}.{STATE}"
            Path(f"{path}.json").write_text(json.dumps(rest))
            save_file(
                {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}, f"{path}.safetensors"
            )
            # Not signed if the node raised: each rank on which it raised overwrites the state.
            written += [] if failed else [f"{path.name}.json", f"{path.name}.safetensors"]
        self._sign(step, node.id, written)

    def _folder(self, step: Step) -> Path:
        assert self.folder is not None
        return folder_of(self.folder, step.number)

    def _write_groups(self, step: Step, name: str, groups: Groups, more: dict[str, Any]) -> list[str]:
        """Write rows and their description; returns the names of the files that only this rank writes."""
        folder, ranks = self._folder(step), self.run.transport.world_size
        folder.mkdir(parents=True, exist_ok=True)
        signature_of(folder, name, self.run.rank, ranks).unlink(missing_ok=True)
        written = write_rows(folder, name, groups, ranks)
        draft = folder / f"{name}.json.{self.run.rank}"  # several ranks may write the same file; the last one stays
        content = {**described(groups, ranks), **more}
        draft.write_text(json.dumps({"sha256": digest_of(content), **content}))
        os.replace(draft, folder / f"{name}.json")
        return written

    def _sign(self, step: Step, name: str, written: Collection[str]) -> None:
        """Write the digests of files that are written and do not change any more."""
        folder = self._folder(step)
        signature = signature_of(folder, name, self.run.rank, self.run.transport.world_size)
        signature.write_text(json.dumps({file: sha256(folder / file) for file in written}))

    def _laid(
        self, space: RowSpace, node: Node, layout: Layout, step: Step, partition: Partition | None = None
    ) -> RowSpace:
        """The space with only the partition in the node's layout; rows that the node must not see are dropped."""
        at = space.partition(layout) if partition is None else partition
        out = step.left_out(space, node)
        return replace(space, dropped=space.dropped if out is None else out, lies={layout: at})


def folder_of(folder: Path, step: int) -> Path:
    """The folder of a step's inputs, for a step counted from 0: `step-00000007` for 6."""
    return folder / f"step-{step + 1:08d}"


def signature_of(folder: Path, name: str, rank: int, world_size: int) -> Path:
    """The file with the SHA-256 of a rank's files under a name; missing if the run was killed while it wrote these."""
    return folder / f"{of_rank(name, rank, world_size)}.{WRITTEN}.json"


def key_of(graph: Graph, node: Node, value: str) -> str:
    """The name under which the rows of a value are stored: `rollout`, or `each answer` if it is read as `Each`."""
    return f"{EACH}{graph.space_of(value)}" if value in node.each else graph.seen_in(node, value)


FIX = "bring the file back, or run the step again with `trainer.dump_steps`"


@dataclass(frozen=True)
class StoredInputs:
    """The stored inputs of one node in one step, as `rlflow replay` reads them.

    Attributes:
        folder: Folder of the step.
        node: Name of the node.
        draw: Number of the draw of prompts that the node ran on, from 0.
        failed: Error that the node raised, by rank; ranks where it did not raise are left out.
        ranks: Ranks that ran the node.
        there: Ranks whose rows are stored; fewer than `ranks` if the node raised on some ranks alone.
        described: The rows of these ranks and their layout, in the form of `<node>.json`.
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
        """Read the description of a node's inputs and compare all files with their SHA-256; tensors are read later.

        Raises:
            UserError: No rank's rows are stored, or a file is missing or damaged.
        """
        found, ranks = _described(folder, node)
        there = tuple(rank for rank in ranks if (folder / f"{of_rank(node, rank, found['ranks'])}.json").is_file())
        if not there:
            raise UserError(
                f"{folder} has no rows of node `{node}`: the run was killed while it wrote them; replay another step"
            )
        files = {rank: folder / f"{of_rank(f'{node}.{FAILED}', rank, found['ranks'])}.txt" for rank in ranks}
        with readable_as(folder, node):
            failed = {rank: file.read_text(errors="replace") for rank, file in files.items() if file.is_file()}
        _check_written(folder, node, there, found["ranks"])
        if (folder / f"{node}.{MADE}.json").is_file():
            made, makers = _described(folder, f"{node}.{MADE}")
            _check_written(folder, f"{node}.{MADE}", makers, made["ranks"])
        with readable_as(folder, node):
            return cls(folder, node, int(found["draw"]), failed, ranks, there, of_ranks(found, there))

    def state(self) -> dict[str, Any]:
        """The module's `state_dict` before the call."""
        name = f"{self.node}.{STATE}"
        with readable_as(self.folder, name):
            path = self.folder / name
            return with_tensors(json.loads(Path(f"{path}.json").read_text()), load_file(f"{path}.safetensors"))

    def put(self, run: Run, layout: Layout, step: Step) -> None:
        """Put the node's inputs into a step of this one process: the rows of all ranks, ordered by path."""
        graph, node = run.graph, run.graph.nodes[self.node]
        if missing := sorted({*self.described["values"]} ^ {*node.reads}):
            raise UserError(
                f"{self.folder} has the inputs of the run's `{self.node}`, and only one of that node and the present"
                f" one reads `{missing[0]}`; replay with the algorithm of the run"
            )
        values = {name: GroupValue(graph.type_of(name), key_of(graph, node, name), layout, None) for name in node.reads}
        stored = self._rows(self.node, self.described, values, run, layout, step.number)
        step.spaces |= {key.removeprefix(EACH): space for key, space in stored.spaces.items()}
        for name, value in stored.values.items():
            step.buffer.put(name, value.rows, value.annotation, stored.spaces[value.space], layout)
            if name in node.each:
                step.buffer.issue(name, layout, step.spaces[node.inside])

    def made(self, run: Run, layout: Layout, step: int) -> tuple[Any, RowSpace] | None:
        """The result of the node in the run, from all ranks, and its row space; None if it was not stored."""
        name, node = f"{self.node}.{MADE}", run.graph.nodes[self.node]
        if not (self.folder / f"{name}.json").is_file():
            return None
        described, _ = _described(self.folder, name)
        key = next(iter(described["spaces"]))
        values = {self.node: GroupValue(node.returns, key, layout, None)}
        stored = self._rows(name, described, values, run, layout, step)
        return stored.values[self.node].rows, stored.spaces[key]

    def _rows(
        self, name: str, described: dict[str, Any], values: dict[str, GroupValue], run: Run, layout: Layout, step: int
    ) -> Groups:
        with readable_as(self.folder, name):
            levels = {key: run.graph.levels(key.removeprefix(EACH)) for key in described["spaces"]}
            spaces = {key: space_without_rows(of_key, layout) for key, of_key in levels.items()}
            like = Groups(layout.ranks[0], spaces, values)
            read = read_rows(self.folder, name, described, like, run.strategy.root_device)
        return Groups(read.rank, {key: run.in_step(space, step) for key, space in read.spaces.items()}, read.values)


@contextmanager
def readable_as(folder: Path, name: str) -> Iterator[None]:
    """A context for reading files, in which an error becomes a `UserError` that names the file."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, RuntimeError,
            SafetensorError, TypeError, ValueError) as error:  # fmt: skip
        file = getattr(error, "filename", None) or folder / f"{name}.json or a file next to it"
        raise UserError(
            f"{file} cannot be read ({type(error).__name__}: {one_line(error)}): it is damaged or gone; {FIX}"
        ) from error


def _described(folder: Path, name: str) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The content of `<name>.json`, and the ranks that ran the node."""
    with readable_as(folder, name):
        found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
        written = found.pop("sha256", None)  # an older run has none
        if written not in (None, digest_of(found)):
            raise UserError(f"{folder / name}.json is not what the run wrote: its SHA-256 is another; {FIX}")
        return found, tuple(list(found["spaces"].values())[0]["dealt"][0][0]["ranks"])  # noqa: RUF015 (none is damage)


def _check_written(folder: Path, name: str, ranks: Iterable[int], world_size: int) -> None:
    """Refuse files that differ from what ranks wrote; files without digests (of an older or killed run) pass."""
    for rank in ranks:
        signature = signature_of(folder, name, rank, world_size)
        if not signature.is_file():
            continue
        with readable_as(folder, name):
            for file, digest in _signed(signature).items():
                if not (folder / file).is_file():
                    raise UserError(f"{folder / file} is not there, and the run wrote it; {FIX}")
                if sha256(folder / file) != digest:
                    raise UserError(f"{folder / file} is not what the run wrote: its SHA-256 is another; {FIX}")


def _signed(signature: Path) -> dict[str, str]:
    try:
        found: dict[str, str] = dict(json.loads(signature.read_text()))
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{signature} is damaged ({one_line(error)}); {FIX}") from error
    return found


def difference(here: Any, there: Any, annotation: Any, lengths: Tensor) -> float:
    """The largest absolute difference of two values of one type, over all columns.

    It is 0 if everything is equal, and infinite if shapes, names, texts or integers differ, or if a number is NaN in
    only one of the values. Padding of columns per token is not compared.

    Args:
        here: A value of `B` rows.
        there: Another value of `B` rows.
        annotation: The type of both.
        lengths: `[B]`, response tokens of each row; what comes after them is padding.
    """
    largest = 0.0
    for column in columns(annotation):
        one, other = (column.of(each) for each in (here, there))
        if isinstance(one, NotSent) or isinstance(other, NotSent) or column.kind is ColumnKind.PATH:
            continue
        if column.kind is ColumnKind.TOKEN:
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
    return float(apart.where(~apart.isnan(), math.inf).max()) if len(apart) else 0.0  # NaN if only one of them is
