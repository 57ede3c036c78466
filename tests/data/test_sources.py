"""Rows come back as they were written; what cannot be read is named by file and row."""

from __future__ import annotations

import datetime
import json
import os
import re
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from rlflow.data.sources import JSONL, HuggingFace, Parquet, Source
from rlflow.errors import UserError

ROWS = [{"question": f"{a}+{a}=", "answer": str(2 * a), "extra": {"a": a}} for a in range(5)]


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def jsonl(folder: Path) -> Source:
    return JSONL(write(folder / "data.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS)))


def parquet_file(folder: Path) -> Source:
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "data.parquet", row_group_size=2)
    return Parquet(str(folder / "data.parquet"))


def saved_split(folder: Path) -> Source:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder / "saved"))
    return HuggingFace(str(folder / "saved"))


def saved_splits(folder: Path) -> Source:
    other = datasets.Dataset.from_list([{"question": "other"}])
    datasets.DatasetDict({"test": other, "train": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(folder / "saved"))
    return HuggingFace(str(folder / "saved"), split="train")


def folder_of_files(folder: Path) -> Source:
    (folder / "files").mkdir()
    write(folder / "files" / "train.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS))
    return HuggingFace(str(folder / "files"))


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("written", [jsonl, parquet_file, saved_split, saved_splits, folder_of_files])
def test_rows_are_read_as_they_were_written_in_any_order(written, tmp_path: Path) -> None:
    source = written(tmp_path)

    assert len(source) == 5
    assert [source[row] for row in (3, 0, 4, 1, 2, 3)] == [ROWS[row] for row in (3, 0, 4, 1, 2, 3)]


def parts(folder: Path) -> Path:
    """Rows in two files of a folder that names a column, in groups of 2, 2, 1 and 2, 1 rows."""
    for number, rows in enumerate((ROWS, ROWS[:3])):
        (folder / f"part={number}").mkdir(parents=True)
        path = folder / f"part={number}" / "data.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    return folder


def test_row_groups_have_the_rows_of_the_whole_in_their_order(tmp_path: Path) -> None:
    source = Parquet(str(parts(tmp_path / "parts")))
    whole = parquet.read_table(tmp_path / "parts").to_pylist()
    mixed = [7, 0, 5, 1, 4, 0]

    assert len(source) == len(whole) == 8
    assert [source[row] for row in range(8)] == whole
    assert source.read(mixed) == [whole[row] for row in mixed]


def test_a_row_group_is_read_once_for_all_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlflow.data.sources.HELD_BYTES", 1)
    source = Parquet(str(parts(tmp_path / "parts")))
    read = _counted_groups(source)

    source.read([7, 0, 5, 1, 6, 0])  # 0 and 1 lie in the first group, 5 and 6 in the fourth, 7 in the last
    assert read == [0, 3, 4]


def test_no_more_row_groups_are_held_than_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Parquet(str(parts(tmp_path / "parts")))
    read = _counted_groups(source)

    for held_bytes, expected in ((2**20, [0, 4]), (1, [0, 4, 0, 4])):
        source._held.clear()
        read.clear()
        monkeypatch.setattr("rlflow.data.sources.HELD_BYTES", held_bytes)
        for row in (0, 7, 1, 7):
            source[row]
        assert read == expected


def _counted_groups(source: Parquet) -> list[int]:
    """The numbers of the groups that are read from now on."""
    read: list[int] = []
    assert len(source)  # which the files say

    class Counted:
        def __init__(self, number: int, group: Any) -> None:
            self.number, self.group = number, group

        def to_table(self, schema: Any) -> Any:
            read.append(self.number)
            return self.group.to_table(schema=schema)

    source._groups[:] = [Counted(number, group) for number, group in enumerate(source._groups)]
    return read


@pytest.mark.parametrize("written", [jsonl, parquet_file, saved_split])
def test_a_digest_is_of_the_rows_and_not_of_their_place(written, tmp_path: Path) -> None:
    digests = []
    for name, rows in (("one", ROWS), ("same", ROWS), ("other", [*ROWS[:-1], {**ROWS[-1], "answer": "9"}])):
        (tmp_path / name).mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.data.test_sources.ROWS", rows)
            digests.append(written(tmp_path / name).digest())

    if written is not saved_split:  # each save of it has another fingerprint
        assert digests[0] == digests[1]
    assert digests[2] not in digests[:2]


@pytest.mark.parametrize("kind", [JSONL, Parquet])
def test_a_source_opens_nothing_until_it_is_read(kind) -> None:
    source = kind("nowhere/data")

    with pytest.raises(UserError, match=r"`path` is 'nowhere/data', and there is no such file in .*; check the path"):
        len(source)


def test_a_folder_without_jsonl_files_is_not_jsonl(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").touch()
    with pytest.raises(UserError, match=r"which is a folder without a .jsonl file; give a JSON Lines file$"):
        len(JSONL(str(tmp_path)))


def test_a_folder_of_jsonl_files_has_the_rows_of_all_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    for name, text in (
        ("b.jsonl", '{"n": 2}\n\n{"n": 3}'),
        ("a.jsonl", '{"n": 1}\n'),
        ("more/c.jsonl", '{"n": 4}\n[]'),
    ):
        write(tmp_path / name, text)
    source = JSONL(str(tmp_path))
    assert [row["n"] for row in source.read(range(4))] == [1, 2, 3, 4]
    assert source.where(2) == f"{tmp_path}/b.jsonl, line 3"
    with pytest.raises(UserError, match=r"more/c.jsonl, line 2 is not a JSON object"):
        source[4]


def test_a_folder_of_many_files_has_few_of_them_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlflow.data.sources.MOST_OPEN", 2)
    for number in range(9):
        write(tmp_path / f"{number}.jsonl", f'{{"n": {number}}}\n')
    source = JSONL(str(tmp_path))
    assert [row["n"] for row in source.read([4, 0, 8, 4, 2])] == [4, 0, 8, 4, 2]
    opened = [os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")]
    assert len([path for path in opened if path.startswith(str(tmp_path))]) == 2


def test_files_are_opened_again_in_another_folder_and_one_that_is_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlflow.data.sources.MOST_OPEN", 1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    for number in range(2):
        write(tmp_path / f"rows/{number}.jsonl", f'{{"n": {number}}}\n')
    source = JSONL("rows")
    assert len(source) == 2
    monkeypatch.chdir("/")
    assert ([row["n"] for row in source.read([0, 1])], source.folder(0)) == ([0, 1], tmp_path / "rows")
    (tmp_path / "rows/0.jsonl").rename(tmp_path / "rows/2.jsonl")
    (tmp_path / "rows/0.jsonl").symlink_to("0.jsonl")  # to itself
    with pytest.raises(
        UserError, match=r"^rows/0.jsonl, line 1 cannot be read: .*Too many levels.*; make the file readable, and"
    ):
        source[0]
    (tmp_path / "rows/0.jsonl").unlink()
    with pytest.raises(UserError, match=r"^rows/0.jsonl, line 1 is gone: .*No such file.*; put it back, and start aga"):
        source[0]


def test_a_device_is_not_a_source_and_is_not_read() -> None:
    with pytest.raises(
        UserError, match=r"is '/dev/zero', which is a device or a pipe; give a JSON Lines file or a folder of them$"
    ):
        len(JSONL("/dev/zero"))
    with pytest.raises(UserError, match=r"which is a device or a pipe; give a Parquet file or a folder of them$"):
        len(Parquet("/dev/zero"))


def test_blank_lines_are_not_rows_but_count_as_lines(tmp_path: Path) -> None:
    source = JSONL(write(tmp_path / "a.jsonl", '{"n": 1}\n\n  \n{"n": 2}\n\n'))

    assert [source[row]["n"] for row in range(len(source))] == [1, 2]
    assert source.where(1) == f"{source.path}, line 4"


def test_the_last_line_needs_no_newline_and_windows_ones_are_read(tmp_path: Path) -> None:
    source = JSONL(write(tmp_path / "a.jsonl", '{"n": "é"}\r\n{"n": "\u2028"}'))

    assert [source[row]["n"] for row in range(len(source))] == ["é", "\u2028"]


def test_an_empty_jsonl_file_has_no_rows(tmp_path: Path) -> None:
    assert len(JSONL(write(tmp_path / "a.jsonl", ""))) == 0


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"n": 2', "line 2 is not JSON"),
        (b'{"n": "\xff"}', "line 2 is not JSON"),
        (b'{"n": "\xed\xa0\xbd\xed\xb8\x80"}', "line 2 is not JSON"),  # an emoji as two halves, as Java writes it
        (b"[1, 2]", "line 2 is not a JSON object"),
    ],
)
def test_a_line_that_is_not_a_row_is_named(line: bytes, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"n": 1}\n' + line + b"\n")
    source = JSONL(str(tmp_path / "a.jsonl"))

    with pytest.raises(UserError, match=f"a.jsonl, {complaint}") as raised:
        source[1]
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_parquet_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a.parquet is not Parquet .*; check `path`"):
        len(Parquet(write(tmp_path / "a.parquet", "question\n1+1=\n")))


def test_a_missing_split_is_named_with_the_existing_ones(tmp_path: Path) -> None:
    source = saved_splits(tmp_path)
    source = HuggingFace(source.path, split="trains")

    with pytest.raises(UserError, match=re.escape('it has test, train. Did you mean "train"? Set `split`')):
        len(source)


def test_a_dataset_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    source = HuggingFace(str(tmp_path / "empty"))

    with pytest.raises(UserError, match=r"empty\[train\] .*cannot be loaded .*; check `path`, `subset` and `split`"):
        len(source)


def test_parquet_keeps_what_json_cannot_carry_for_the_scan_to_name(tmp_path: Path) -> None:
    row = {"when": datetime.date(2024, 1, 2)}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")

    assert Parquet(str(tmp_path / "a.parquet"))[0] == row


@pytest.mark.parametrize("line", ['{"a": 1, "b": 2, "a": 1}', '{"b": {"a": 1, "a": 2}}'])
def test_a_key_that_stands_twice_in_a_row_is_named(line: str, tmp_path: Path) -> None:
    source = JSONL(write(tmp_path / "x.jsonl", f"{{}}\n{line}\n"))
    with pytest.raises(UserError, match=r"x\.jsonl, line 2 has the key 'a' twice, so one value would be lost"):
        source[1]
