"""A checkpoint written by all ranks at once, each what it holds, beside the run or while it waits."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlflow.checkpoint.manifest import NAME, Progress, lacks, monitored_value, write_manifest
from rlflow.checkpoint.reading import RoleIndex, Stored, index_name
from rlflow.checkpoint.retention import Retention
from rlflow.checkpoint.stored_groups import write_groups
from rlflow.databuffer.groups import Groups
from rlflow.storage.disk import Disk
from rlflow.storage.draft import LEFT, Draft, Record, not_written, of_rank
from rlflow.storage.tensors import StoredTensor, TensorRange, all_finite, write_tensors
from rlflow.strategies.strategy import TrainingStrategy

OF_RANK = "logged"  # in the names of files of what a rank alone has
MODULE = "module-state"  # in the names of files of the module's tensors; no role is called so


def role_share(strategy: TrainingStrategy, role: str, disk: Disk) -> tuple[dict[str, Any], Callable[[Path], str]]:
    """What one rank records of a role, and the function that writes the rank's file of it.

    Args:
        strategy: Holds the role.
        role: Name of the role.
        disk: Writes the file; its tensors are copied now where the run goes on meanwhile.

    Returns:
        The record for `index_of`, JSON-able; and a function that writes the file at a path and gives its SHA-256.
    """
    entries: list[StoredTensor] = []
    copies: list[Tensor] = []
    shapes: dict[str, Sequence[int]] = {}
    ranges: dict[str, tuple[int, int]] = {}
    kinds: list[str] = []
    for parameter, shape, parts in strategy.state_parts(role):
        shapes[parameter], kinds = shape, list(parts)
        ((start, length),) = {(part.start, part.values.numel()) for part in parts.values()}
        if length:
            ranges[parameter] = start, length
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
    """The name of a rank's file of a role's state."""
    return f"{of_rank(role, rank, world_size)}.safetensors"


def _named(parameter: str, parts: Mapping[str, TensorRange]) -> Iterator[tuple[str, Tensor]]:
    for kind, part in parts.items():
        if part.values.numel():
            yield f"{parameter}/{kind}", part.values


def draft_of(folder: Path, step: int) -> Draft:
    """A checkpoint of `folder` while it is written."""
    return Draft(folder / f"step-{step:08d}")


def write_share(
    draft: Draft,
    disk: Disk,
    strategy: TrainingStrategy,
    roles: Iterable[str],
    nodes: Mapping[int, str],
    rank: int,
    groups: Mapping[str, Groups] | None = None,
    of_rank_alone: Mapping[str, Any] | None = None,
    module_tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Let `disk` write this rank's files of a checkpoint, and then the record of them; called by all ranks of the job.

    Args:
        draft: That is open.
        disk: Writes; the state must stay as it is until it has, unless it is asynchronous.
        strategy: Holds the roles.
        roles: All trained roles, those that live on other ranks too.
        nodes: The machine's name of every rank of the job.
        rank: This one.
        groups: Rows of later steps by the name to write them under.
        of_rank_alone: What this rank alone has, such as its random generators' states; JSON-able.
        module_tensors: Those of the module's state that this rank writes, by name.
    """
    digests: dict[str, str] = {}
    failed: list[BaseException] = []
    try:  # small, and of objects that the run goes on to change
        if of_rank_alone:
            name = f"{of_rank(OF_RANK, rank, len(nodes))}.json"
            (draft.path / name).write_text(json.dumps(of_rank_alone))
            digests[name] = ""
        if module_tensors:
            name = _file_of(MODULE, rank, len(nodes))
            save_file(dict(module_tensors), draft.path / name)
            digests[name] = ""
        for name, carried in (groups or {}).items():
            digests |= dict.fromkeys(write_groups(draft.path, name, carried, len(nodes)), "")
    except (OSError, SafetensorError) as error:
        failed.append(error)
    shares = {role: role_share(strategy, role, disk) for role in roles if strategy.holds(role)}

    def write() -> None:
        if failed:
            raise failed[0]
        for role, (_, write_file) in shares.items():
            name = _file_of(role, rank, len(nodes))
            digests[name] = write_file(draft.path / name)

    def record(error: BaseException | None) -> None:
        if error is None:
            more = {role: of_role for role, (of_role, _) in shares.items()}
            draft.add(Record(rank, draft.file_records(digests), more))
        else:
            for name in digests:
                (draft.path / name).unlink(missing_ok=True)
            for role in shares:  # what is cut short too: its room is needed to say so
                (draft.path / _file_of(role, rank, len(nodes))).unlink(missing_ok=True)
            draft.add(Record(rank, error=not_written(error, draft.target, rank, nodes[rank])))

    disk.do(write)
    disk.report(record)


def written_state(draft: Draft, role: str, ranks: Sequence[int], nodes: Mapping[int, str], timeout_s: float) -> Stored:
    """A role's state in a checkpoint that has no name yet, once its ranks have written it; see `leave`.

    Raises:
        UserError: One could not, or says nothing in time.
    """
    return Stored(draft.path, role, index_of(role, draft.collect(ranks, nodes, timeout_s), len(nodes)))


def leave(draft: Draft, disk: Disk, nodes: Mapping[int, str], rank: int) -> None:
    """Let `disk` say that this rank neither writes nor reads the checkpoint's files any more; called by all ranks."""

    def record(error: BaseException | None) -> None:
        why = None if error is None else not_written(error, draft.target, rank, nodes[rank])
        draft.add(Record(rank, error=why), LEFT)

    disk.report(record)


def complete(
    draft: Draft,
    disk: Disk,
    roles: Iterable[str],
    progress: Progress,
    nodes: Mapping[int, str],
    timeout_s: float,
    retention: Retention,
) -> None:
    """Let `disk` wait until all ranks have written and left it, and give the checkpoint its name; by one rank.

    It gets its name when it is complete, so a run that is killed meanwhile leaves the ones before. Checkpoints of later
    steps, which a run left that was continued from before them, are removed first: else a run that is killed between
    would go on from one of those. Then those that need not stay are removed.

    Args:
        draft: That all write.
        disk: Of this rank.
        roles: All trained roles.
        progress: Where the run stands.
        nodes: The machine's name of every rank of the job.
        timeout_s: Seconds that others may take longer than this rank.
        retention: Which stay.
    """

    def finish(error: BaseException | None) -> None:
        if error is not None:  # of this rank, which reports it
            draft.discard()
            return
        try:
            records = draft.collect(nodes, nodes, timeout_s)
            draft.collect(nodes, nodes, timeout_s, LEFT)
            files = {name: (*file, record.rank) for record in records for name, file in record.files.items()}
            for role in roles:
                index_of(role, records, len(nodes)).write(draft.path / index_name(role))
                files |= {name: (*file, 0) for name, file in draft.file_records({index_name(role): ""}).items()}
            write_manifest(draft.path, progress, files)
            for later in draft.target.parent.glob("step-*"):
                if NAME.fullmatch(later.name) and later.name > draft.target.name:
                    shutil.rmtree(later)
            draft.complete()
        except BaseException:
            draft.discard()
            raise
        _remove_others(draft.target, retention)

    disk.report(finish)


def index_of(role: str, records: Iterable[Record], world_size: int) -> RoleIndex:
    """The index of what ranks wrote of a role."""
    shares = {record.rank: record.more[role] for record in records if role in record.more}
    (lead,) = (share for share in shares.values() if "shapes" in share)
    ranges = {}
    for name, shape in lead["shapes"].items():
        ranges[name] = sorted(
            (*share["ranges"][name], place) for place, share in enumerate(shares.values()) if name in share["ranges"]
        )
        ends = [0, *(start + length for start, length, _ in ranges[name])]
        assert [start for start, _, _ in ranges[name]] == ends[:-1], (role, name, ranges[name])  # each element once
        assert ends[-1] == math.prod(shape), (role, name, shape, ranges[name])
    files = [_file_of(role, rank, world_size) for rank in shares]
    of_lead = {name: lead[name] for name in ("updates", "untrained", "kinds", "shapes", "loss_scale")}
    return RoleIndex(files=files, ranges=ranges, **of_lead)


def _remove_others(newest: Path, retention: Retention) -> None:
    """Of a step's folder: those of the last run's steps that need not stay, and what runs left that were killed."""
    folder = newest.parent
    earlier = sorted(path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.name <= newest.name)
    whole = [path for path in earlier if lacks(path) is None]
    stays = retention.staying({path: monitored_value(path, retention.monitor) for path in whole})
    for other in folder.glob("step-*"):
        if other not in stays:
            shutil.rmtree(other)


def read_module_tensors(folder: Path) -> dict[str, Tensor]:
    """What all ranks wrote of the module's tensors, by name."""
    files = sorted(folder.glob(f"{MODULE}-*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def read_of_rank(folder: Path, rank: int, world_size: int) -> list[Any]:
    """What each rank wrote that it alone had, of as many ranks as wrote it, shared out among the ranks of now."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob(f"{OF_RANK}-*.json"))[rank::world_size]]
