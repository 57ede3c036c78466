"""A checkpoint gets its name when no rank reads its files any more."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlflow import checkpoint
from rlflow.errors import UserError
from rlflow.storage.disk import Disk
from rlflow.storage.draft import Draft, Record

NODES = {0: "first", 1: "second"}


def of(folder: Path, rank: int = 0, timeout_s: float = 60) -> Draft:
    """The draft, as this rank sees it."""
    return Draft(checkpoint.folder_of(folder, 1), rank, NODES, timeout_s)


def written(folder: Path, timeout_s: float = 60) -> Draft:
    """A checkpoint that two ranks have written, and the first has left."""
    draft = of(folder, 0, timeout_s)
    draft.open()
    for rank in NODES:
        draft.add(Record(rank))
    with Disk() as disk:
        checkpoint.leave(draft, disk)
    return draft


def complete(draft: Draft) -> None:
    with Disk() as disk:
        progress = checkpoint.Progress(1, 0, "rows")
        checkpoint.complete(draft, disk, (), progress, checkpoint.Retention(2))


def test_a_checkpoint_is_complete_when_the_last_rank_has_closed_its_files(tmp_path: Path) -> None:
    draft = written(tmp_path, 0.1)
    said = r"0.1 s after the others, its files were still read, to write models, by rank 1 on second; look at that disk"
    with pytest.raises(UserError, match=said):
        complete(draft)
    assert not draft.target.exists()
    draft = written(tmp_path)
    with Disk() as disk:
        checkpoint.leave(of(tmp_path, 1), disk)
    complete(draft)
    assert [path.name for path in draft.target.iterdir()] == ["state.json"]


def test_a_failed_write_of_one_rank_leaves_the_checkpoint_incomplete(tmp_path: Path) -> None:
    draft, disk = written(tmp_path), Disk()
    disk.do(lambda: 1 / 0)
    checkpoint.leave(of(tmp_path, 1), disk)
    with pytest.raises(ZeroDivisionError):
        disk.wait()
    with pytest.raises(UserError, match="cannot be written by rank 1 on second: division by zero"):
        complete(draft)
    assert [path.name for path in tmp_path.rglob("step-*")] == [draft.path.name]
