"""A folder gets its name when every rank has written its part."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rlflow.errors import UserError
from rlflow.storage.draft import Draft, Record

NODES = {0: "first", 1: "second", 2: "second"}


def opened(folder: Path, timeout_s: float = 60) -> Draft:
    draft = Draft(folder / "model", 0, NODES, timeout_s)
    draft.open()
    return draft


def test_a_rank_that_writes_nothing_is_named_with_its_machine(tmp_path: Path) -> None:
    draft = opened(tmp_path, 0.1)
    draft.add(Record(1))
    with pytest.raises(UserError, match=r"after the others, nothing was written by rank 0 on first, 2 on second;"):
        draft.collect(NODES)


def test_what_one_rank_could_not_write_is_reported(tmp_path: Path) -> None:
    draft = opened(tmp_path)
    for rank in NODES:
        draft.add(Record(rank, error="no room" if rank == 2 else None))
    with pytest.raises(UserError, match="no room"):
        draft.collect(NODES)


def test_the_folder_before_is_there_until_the_new_one_is_complete(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/old").write_text("old")
    draft = opened(tmp_path)
    (draft.path / "new").write_text("new")
    draft.add(Record(0, draft.file_records({"new": ""}), {"role": 1}))
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["old"]
    (record,) = draft.collect([0])
    # echo -n new | sha256sum
    assert record.files == {"new": ("11507a0e2f5e69d5dfa40a62a1bd7b6ee57e6bcd85c67c9b8431b36fff21c437", 3)}
    assert record.more == {"role": 1}
    draft.complete()
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "new"]


def test_while_it_is_renamed_the_folder_before_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/old").touch()
    draft, rename = opened(tmp_path), Path.rename
    found: list[bool] = []

    def look(path: Path, target: Path) -> Path:
        found.append(any(tmp_path.glob("model*/old")))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", look)
    draft.complete()
    assert found == [True, True]


def test_a_folder_renamed_by_a_run_that_was_killed_gets_its_name_back(tmp_path: Path) -> None:
    (tmp_path / "model.before").mkdir()
    (tmp_path / "model.before/old").write_text("old")
    draft = opened(tmp_path)
    assert (tmp_path / "model/old").read_text() == "old"
    draft.discard()
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "old"]


def test_a_rank_that_could_not_write_is_not_kept_waiting_for_others(tmp_path: Path) -> None:
    draft = opened(tmp_path, 600)
    draft.add(Record(2, error="no room"))
    with pytest.raises(UserError, match="no room"):
        draft.collect(NODES)


def test_a_rank_without_room_to_report_its_failure_is_named_without_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = opened(tmp_path)
    with monkeypatch.context() as full:

        def write(path: Path, text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        full.setattr(Path, "write_text", write)
        with pytest.raises(OSError, match="No space left"):
            draft.add(Record(1))
    draft.add(Record(0))
    with pytest.raises(UserError, match="cannot be written by rank 1 on second: No space left on device"):
        draft.collect([0, 1])


@pytest.mark.parametrize("damage", [b"{", b"[1, 2]", b'{"rank": 1}', b"\xff\xfe"])
def test_a_record_that_the_disk_damaged_is_named(damage: bytes, tmp_path: Path) -> None:
    draft = opened(tmp_path)
    draft.add(Record(1))
    (record,) = draft.path.iterdir()
    record.write_bytes(damage)
    with pytest.raises(OSError, match=rf"{record} is damaged \(.+\)$"):
        draft.collect([1])
