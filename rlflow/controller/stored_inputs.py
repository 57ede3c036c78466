"""What a run kept of a node's inputs, read back into a step of one process, and compared with what the run made."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rlflow.checkpoint import digest_of
from rlflow.checkpoint.kept_rows import of_ranks, read_rows
from rlflow.controller.in_step import InStep
from rlflow.controller.inputs import EACH, FAILED, MADE, STATE, key_of, signature_of
from rlflow.controller.run import Run
from rlflow.databuffer.kept import Kept, KeptValue
from rlflow.databuffer.rows import NUMBERS, ROOT, RowSpace
from rlflow.errors import UserError, one_line
from rlflow.state.tensors import with_tensors
from rlflow.storage.draft import of_rank
from rlflow.storage.tensors import sha256
from rlflow.values.absent import Absent
from rlflow.values.columns import columns
from rlflow.values.cuts import Cut
from rlflow.values.host_copy import on_host
from rlflow.values.layout import Layout
from rlflow.values.ragged import Ragged

MEND = "bring the file back, or run the step again with `trainer.keep_inputs`"


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
        found, ranks = _described(folder, node)
        there = tuple(rank for rank in ranks if (folder / f"{of_rank(node, rank, found['ranks'])}.json").is_file())
        if not there:
            raise UserError(f"{folder} has no rows of node `{node}`: the run was killed while it wrote them")
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
        """The module's, before the call."""
        name = f"{self.node}.{STATE}"
        with readable_as(self.folder, name):
            path = self.folder / name
            return with_tensors(json.loads(Path(f"{path}.json").read_text()), load_file(f"{path}.safetensors"))

    def put(self, run: Run, layout: Layout, now: InStep, device: torch.device) -> None:
        """Give a step of one process what the node reads, the rows of all ranks in the order of their paths."""
        graph, node = run.graph, run.graph.nodes[self.node]
        if missing := sorted({*self.described["values"]} ^ {*node.reads}):
            raise UserError(
                f"{self.folder} has what an earlier `{self.node}` read, and `{missing[0]}` is read by one of the two"
                " alone; replay with the algorithm of the run"
            )
        values = {name: KeptValue(graph.type_of(name), key_of(graph, node, name), layout, None) for name in node.reads}
        kept = self._rows(self.node, self.described, values, run, layout, now.step, device)
        now.spaces |= {key.removeprefix(EACH): space for key, space in kept.spaces.items()}
        for name, value in kept.values.items():
            now.buffer.put(name, value.rows, value.annotation, kept.spaces[value.space], layout)
            if name in node.each:
                now.buffer.issue(name, layout, now.spaces[node.inside])

    def made(self, run: Run, layout: Layout, step: int, device: torch.device) -> tuple[Any, RowSpace] | None:
        """What the node returned in the run, and its rows; None where that was not kept."""
        name, node = f"{self.node}.{MADE}", run.graph.nodes[self.node]
        if not (self.folder / f"{name}.json").is_file():
            return None
        described, _ = _described(self.folder, name)
        key = next(iter(described["spaces"]))
        values = {self.node: KeptValue(node.returns, key, layout, None)}
        kept = self._rows(name, described, values, run, layout, step, device)
        return kept.values[self.node].rows, kept.spaces[key]

    def _rows(
        self,
        name: str,
        described: dict[str, Any],
        values: dict[str, KeptValue],
        run: Run,
        layout: Layout,
        step: int,
        device: torch.device,
    ) -> Kept:
        spaces = {}
        with readable_as(self.folder, name):
            for key in described["spaces"]:
                levels = run.graph.levels(key.removeprefix(EACH))
                none = torch.empty(len(levels) + len(NUMBERS), 0, dtype=torch.int64)
                shards = [none] * layout.shards
                spaces[key] = RowSpace.of_shards(levels[-1], layout, shards, above=levels[:-1] or ROOT)
            read = read_rows(self.folder, name, described, Kept(layout.ranks[0], spaces, values), device)
        seed, balance = run.settings.seed, run.settings.balancing
        in_step = {key: space.at(seed=seed, step=step, balance=balance) for key, space in read.spaces.items()}
        return Kept(read.rank, in_step, read.values)


@contextmanager
def readable_as(folder: Path, name: str) -> Iterator[None]:
    """Around reading what was kept under a name: an older run has no digests, so a damage shows where it is read.

    Raises:
        UserError: It cannot be read.
    """
    try:
        yield
    except UserError:
        raise
    except (OSError, ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, RuntimeError,
            SafetensorError, TypeError, ValueError) as error:  # fmt: skip
        file = getattr(error, "filename", None) or folder / f"{name}.json or a file beside it"
        raise UserError(
            f"{file} cannot be read ({type(error).__name__}: {one_line(error)}): it is damaged or gone; {MEND}"
        ) from error


def _described(folder: Path, name: str) -> tuple[dict[str, Any], tuple[int, ...]]:
    """What `<name>.json` says, and the ranks that it is of."""
    with readable_as(folder, name):
        found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
        written = found.pop("sha256", None)  # none in that of an older run
        if written not in (None, digest_of(found)):
            raise UserError(f"{folder / name}.json is not what the run wrote: its SHA-256 is another; {MEND}")
        return found, tuple(list(found["spaces"].values())[0]["dealt"][0][0]["ranks"])  # noqa: RUF015 (none is damage)


def _check_written(folder: Path, name: str, ranks: Iterable[int], world_size: int) -> None:
    """Refuse files that are not what ranks wrote; of an older run, or a rank that was killed, nothing is known."""
    for rank in ranks:
        signature = signature_of(folder, name, rank, world_size)
        if not signature.is_file():
            continue
        with readable_as(folder, name):
            for file, digest in _signed(signature).items():
                if not (folder / file).is_file():
                    raise UserError(f"{folder / file} is not there, and the run wrote it; {MEND}")
                if sha256(folder / file) != digest:
                    raise UserError(f"{folder / file} is not what the run wrote: its SHA-256 is another; {MEND}")


def _signed(signature: Path) -> dict[str, str]:
    try:
        found: dict[str, str] = dict(json.loads(signature.read_text()))
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{signature} is damaged ({one_line(error)}); {MEND}") from error
    return found


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
