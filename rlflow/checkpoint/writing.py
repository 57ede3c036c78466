"""Writes a checkpoint: each rank writes the tensors that it holds, in a thread during the run or while the run waits.

A save is four calls; the `Disk` of each rank does the writing:

    draft.open()                        one rank: the folder `step-00000020.draft`
    write_share(draft, disk, ...)       all ranks: their files, then a record of sizes and digests
    leave(draft, disk)                  all ranks: record that they write and read no more files
    complete(draft, disk, ...)          one rank: waits for all records, writes indexes and manifest, renames the folder
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rlflow.checkpoint.contents import Snapshot
from rlflow.checkpoint.manifest import MODULE, NAME, OF_RANK, Progress, monitored_values, write_manifest
from rlflow.checkpoint.retention import Retention
from rlflow.checkpoint.stored_groups import write_groups
from rlflow.storage.disk import Disk
from rlflow.storage.draft import LEFT, Draft, Record, of_rank
from rlflow.storage.safetensors_files import StoredTensor, TensorRange, all_finite, write_tensors
from rlflow.storage.stored_role import RoleIndex, StoredRole, index_name
from rlflow.strategies.strategy import TrainingStrategy


def role_share(strategy: TrainingStrategy, role: str, disk: Disk) -> tuple[dict[str, Any], Callable[[Path], str]]:
    """The record of one rank's share of a role, and a function that writes the share to a file.

    Args:
        strategy: Strategy that holds the role.
        role: Name of the role.
        disk: Disk that writes the file. It copies the tensors now if the run continues meanwhile.

    Returns:
        The record for `index_of`, JSON-able: `ranges` by parameter, (start, length), and the columns of a block; on the
        role's leading rank also `updates`, `untrained`, `kinds`, `shapes` and `loss_scale`. And a function that writes
        the safetensors file at a path, tensor by tensor, and returns its SHA-256; it refuses numbers that are not
        finite.
    """
    entries: list[StoredTensor] = []
    copies: list[Tensor] = []
    shapes: dict[str, Sequence[int]] = {}
    ranges: dict[str, tuple[int, ...]] = {}
    kinds: list[str] = []
    for parameter, shape, parts in strategy.state_parts(role):
        shapes[parameter], kinds = shape, list(parts)
        part = next(iter(parts.values()))
        assert {(other.start, other.values.shape) for other in parts.values()} == {(part.start, part.values.shape)}
        if length := part.values.numel():
            ranges[parameter] = part.start, length, *part.values.shape[1:]
        for key, values in _named(parameter, parts):
            entries.append(StoredTensor.of(key, values))
            if disk.asynchronous:
                copies.append(disk.copy(f"{role}/{key}", values))
    record: dict[str, Any] = {"ranges": ranges}
    if strategy.leads(role):
        scale = strategy.roles[role].loss_scale
        record |= {
            "loss_scale": None if scale is None else scale.record(),
            "updates": strategy.roles[role].done,
            "untrained": strategy.roles[role].model.untrained_record(),
            "kinds": kinds,
            "shapes": shapes,
        }

    def values_now() -> Iterator[Tensor]:
        for parameter, _, parts in strategy.state_parts(role):
            for _, values in _named(parameter, parts):
                yield values

    def write(path: Path) -> str:
        values = copies if disk.asynchronous else values_now()
        return write_tensors(path, entries, all_finite(path.parent.stem, role, entries, values))

    return record, write


def _file_of(role: str, rank: int, world_size: int) -> str:
    """The name of the file with a rank's share of a role's state."""
    return f"{of_rank(role, rank, world_size)}.safetensors"


def _named(parameter: str, parts: Mapping[str, TensorRange]) -> Iterator[tuple[str, Tensor]]:
    for kind, part in parts.items():
        if part.values.numel():
            yield f"{parameter}/{kind}", part.values.flatten()


def write_share(
    draft: Draft, disk: Disk, strategy: TrainingStrategy, roles: Iterable[str], snapshot: Snapshot | None = None
) -> None:
    """Let `disk` write this rank's files of a checkpoint, and then the record of them; called by all ranks of the job.

    A file that cannot be written raises nothing here: the record names the error, and `disk.wait` raises it.

    Args:
        draft: The open draft.
        disk: The disk that writes. Unless it is asynchronous, weights must not change until it has written them.
        strategy: The strategy that holds this rank's roles.
        roles: All trained roles, also those on other ranks.
        snapshot: The rest of this rank's state; None to write the roles alone.
    """
    rank, world_size = draft.rank, len(draft.nodes)
    digests: dict[str, str] = {}
    failed: list[BaseException] = []
    try:  # written now: it is small, and some of its objects change while the run continues
        for name in [] if snapshot is None else _write_snapshot(draft.path, snapshot, rank, world_size):
            digests[name] = ""
    except (OSError, SafetensorError) as error:
        failed.append(error)
    shares = {role: role_share(strategy, role, disk) for role in roles if strategy.holds(role)}
    files = {role: _file_of(role, rank, world_size) for role in shares}

    def write() -> None:
        if failed:
            raise failed[0]
        for role, (_, write_file) in shares.items():
            digests[files[role]] = write_file(draft.path / files[role])

    def record() -> Record:
        return Record(rank, draft.file_records(digests), {role: of_role for role, (of_role, _) in shares.items()})

    def report(error: BaseException | None) -> None:
        written = {*digests, *files.values()}  # incomplete files too
        draft.report(error, record, [draft.path / name for name in written])

    disk.do(write)
    disk.report(report)


def _write_snapshot(folder: Path, snapshot: Snapshot, rank: int, world_size: int) -> Iterator[str]:
    """Write the state of one rank, without `state.json`; yields the name of each file that it has written."""
    name = f"{of_rank(OF_RANK, rank, world_size)}.json"
    (folder / name).write_text(json.dumps(snapshot.of_rank))
    yield name
    if snapshot.tensors:
        name = _file_of(MODULE, rank, world_size)
        save_file(dict(snapshot.tensors), folder / name)
        yield name
    for name, groups in snapshot.groups.items():
        yield from write_groups(folder, name, groups, world_size)


def written_state(draft: Draft, role: str, ranks: Sequence[int]) -> StoredRole:
    """A role's state in a draft; waits until the role's ranks have written it. Call `leave` after the last read.

    Raises:
        UserError: A rank could not write its files, or did not in time.
    """
    return StoredRole(draft.path, role, index_of(role, draft.collect(ranks), len(draft.nodes)))


def leave(draft: Draft, disk: Disk) -> None:
    """Let `disk` record that this rank neither writes nor reads the draft's files any more; called by all ranks."""
    disk.report(partial(draft.report, part=LEFT))


def complete(draft: Draft, disk: Disk, roles: Iterable[str], progress: Progress, retention: Retention) -> None:
    """Let `disk` wait until all ranks have written and left the draft, then rename it; called by one rank.

    The draft is renamed when it is complete, so a run that is killed before has its previous checkpoints. After the
    rename, checkpoints that `retention` does not name are removed.

    Args:
        draft: The draft that all ranks write.
        disk: This rank's disk; its `wait` raises what went wrong on any rank. The draft is then still there.
        roles: All trained roles.
        progress: The step and state of the run, for the manifest.
        retention: The checkpoints that stay.
    """

    def prepare() -> None:
        records = draft.collect(draft.nodes)
        draft.collect(draft.nodes, LEFT)
        files = {name: (*file, record.rank) for record in records for name, file in record.files.items()}
        for role in roles:
            index_of(role, records, len(draft.nodes)).write(draft.path / index_name(role))
            files |= {name: (*file, 0) for name, file in draft.file_records({index_name(role): ""}).items()}
        write_manifest(draft.path, progress, files)

    disk.do(prepare)
    disk.do(draft.complete)
    disk.do(partial(_remove_others, draft.target, retention))


def remove_later(newest: Path) -> None:
    """Remove checkpoints of later steps in a folder, from which a run that resumes from `newest` would resume next."""
    for later in newest.parent.glob("step-*"):
        if NAME.fullmatch(later.name) and later.name > newest.name:
            shutil.rmtree(later)


def index_of(role: str, records: Iterable[Record], world_size: int) -> RoleIndex:
    """The index of a role's files, from the records of its ranks; asserts that each element is in exactly one file."""
    shares = {record.rank: record.more[role] for record in records if role in record.more}
    (lead,) = (share for share in shares.values() if "shapes" in share)
    ranges = {}
    for name, shape in lead["shapes"].items():
        ranges[name] = sorted(
            (start, length, place, *columns)
            for place, share in enumerate(shares.values())
            for start, length, *columns in [share["ranges"].get(name, (0, 0))]
            if length
        )
        _require_each_once(role, name, shape, ranges[name])
    files = [_file_of(role, rank, world_size) for rank in shares]
    of_lead = {name: lead[name] for name in ("updates", "untrained", "kinds", "shapes", "loss_scale")}
    return RoleIndex(files=files, ranges=ranges, **of_lead)


def _require_each_once(role: str, name: str, shape: Sequence[int], ranges: Sequence[tuple[int, ...]]) -> None:
    """Assert that each element of a tensor is in exactly one of its ranges and blocks, which are sorted."""
    end = 0
    for start, length, _, *columns in ranges:
        assert start == end, (role, name, ranges)
        if not columns:
            end += length
            continue
        end += columns[0]
        width = math.prod(shape[1:])
        if end % width == 0:  # the last block of these rows
            end += length // columns[0] * width - width
    assert end == math.prod(shape), (role, name, shape, ranges)


def _remove_others(newest: Path, retention: Retention) -> None:
    """Remove checkpoints up to `newest` that need not stay, and drafts and incomplete folders of killed runs."""
    folder = newest.parent
    earlier = sorted(path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.name <= newest.name)
    stays = retention.staying(monitored_values(earlier, retention.monitor))
    for other in folder.glob("step-*"):
        if other not in stays:
            shutil.rmtree(other)
