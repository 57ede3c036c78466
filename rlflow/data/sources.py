"""Where a dataset's rows come from: files and Hugging Face datasets.

Nothing is opened before the first row is asked for. A row holds what JSON can carry, so it can travel between ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import accumulate, groupby
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, cast

from rlflow.errors import UserError, did_you_mean, one_line
from rlflow.no_file import no_file
from rlflow.process.hub import offline_unless_reached

MOST_LETTERS = 1000  # of a path
HELD_BYTES = 256 * 2**20  # of a Parquet dataset's row groups, as Arrow; one is held however large it is


class Source(ABC):
    """Rows of a dataset, read one by one in any order; every rank reads only those that it needs."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What errors call the dataset."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, row: int) -> dict[str, Any]: ...

    def read(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """The given rows, in that order."""
        return [self[row] for row in rows]

    def where(self, row: int) -> str:
        """The place of a row as errors name it."""
        return f"{self.name}, row {row}"

    def digest(self) -> str | None:
        """Of all that rows are made of; where it is equal, they are. None where that costs as much as reading them."""
        return None


class JSONL(Source):
    """One JSON object on each line; blank lines are no rows. A row costs its own line, not the file.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    def name(self) -> str:
        return self.path

    def __len__(self) -> int:
        return len(self._lines[0])

    def __getitem__(self, row: int) -> dict[str, Any]:
        starts, _, lengths = self._lines
        line = os.pread(self._file.fileno(), lengths[row], starts[row])
        if len(line) < lengths[row]:
            raise UserError(f"{self.where(row)} is gone: the file got shorter while the run read it; start again")
        try:
            value = json.loads(line, object_pairs_hook=partial(_once, place=self.where(row)))
            if b"\\ud" in line or b"\\uD" in line:  # half a character, perhaps
                json.dumps(value, ensure_ascii=False).encode()
        except UserError:
            raise
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError too, where the line is not UTF-8
            raise UserError(
                f"{self.where(row)} is not JSON ({one_line(error)}): {_start(line)}; mend or remove the line"
            ) from error
        if not isinstance(value, dict):
            raise UserError(
                f"{self.where(row)} is not a JSON object: {_start(line)}; write each row as {{column: value, ...}}"
            )
        return value

    def where(self, row: int) -> str:
        return f"{self.path}, line {self._lines[1][row]}"

    def digest(self) -> str | None:
        """Of the file's bytes."""
        return digest_of_files(self._existing, [self._existing])

    @cached_property
    def _file(self) -> BinaryIO:
        return self._existing.open("rb")

    @property
    def _existing(self) -> Path:
        return _existing(self.path, "a JSON Lines file", ".jsonl", ".json")

    @cached_property
    def _lines(self) -> tuple[array[int], array[int], array[int]]:
        """The byte offset, the line number (from 1) and the bytes of each row."""
        offsets, numbers, lengths = array("q"), array("q"), array("q")
        self._file.seek(0)
        offset = 0
        for number, line in enumerate(self._file, start=1):
            if line.strip():
                offsets.append(offset)
                numbers.append(number)
                lengths.append(len(line.removesuffix(b"\n")))
            offset += len(line)
        return offsets, numbers, lengths


class Parquet(Source):
    """A Parquet file, or a folder of them, read by row groups: those last read are held, as Arrow, up to `HELD_BYTES`.

    Args:
        path: The file or folder.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    def name(self) -> str:
        return self.path

    def __len__(self) -> int:
        return self._groups.ends[-1] if self._groups.ends else 0

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.read([row])[0]

    def read(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """The given rows in that order; each row group is read once, however its rows are mixed with others."""
        import pyarrow

        found: dict[int, dict[str, Any]] = {}
        groups = self._groups
        for group, of_group in groupby(sorted(set(rows)), key=groups.group_of):
            first = groups.start(group)
            try:
                table = groups.read(group)
                for row in of_group:
                    found[row] = table.slice(row - first, 1).to_pylist()[0]
            except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
                raise UserError(
                    f"rows {first} and on of {self.path} cannot be read ({one_line(error)}); write the file anew"
                ) from error
        return [found[row] for row in rows]

    def digest(self) -> str | None:
        """Of the files' bytes and their places in the folder."""
        path = self._existing
        return digest_of_files(path, sorted(path.rglob("*")) if path.is_dir() else [path])

    @property
    def _existing(self) -> Path:
        return _existing(self.path, "a Parquet file or a folder of them", ".parquet", folder=True)

    @cached_property
    def _groups(self) -> _RowGroups:
        import pyarrow

        path = self._existing
        try:
            return _RowGroups(path.absolute())
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{self.path} is not Parquet ({one_line(error)}); check `path`") from error


class _RowGroups:
    """The row groups of all files, in the order in which Arrow reads them whole.

    Args:
        path: The file or folder.

    Attributes:
        ends: The row after the last of each group, counted over all.
    """

    def __init__(self, path: Path) -> None:
        from pyarrow import parquet

        dataset = parquet.ParquetDataset(path)
        self._schema = dataset.schema
        self._groups = [group for file in dataset.fragments for group in file.split_by_row_group()]
        self.ends = [*accumulate(group.row_groups[0].num_rows for group in self._groups)]
        self._held: OrderedDict[int, Any] = OrderedDict()
        self._lock = Lock()  # the next step's rows are read while others are

    def group_of(self, row: int) -> int:
        """The group in which a row lies."""
        if not 0 <= row < self.ends[-1]:
            raise IndexError(row)
        return bisect_right(self.ends, row)

    def start(self, group: int) -> int:
        """The first row of a group."""
        return self.ends[group - 1] if group else 0

    def read(self, group: int) -> Any:
        """A group's rows as a table."""
        with self._lock:
            if group not in self._held:
                self._held[group] = self._groups[group].to_table(schema=self._schema).combine_chunks()
            self._held.move_to_end(group)
            while len(self._held) > 1 and sum(table.nbytes for table in self._held.values()) > HELD_BYTES:
                self._held.popitem(last=False)
            return self._held[group]


class HuggingFace(Source):
    """A dataset of the hub, a folder that `save_to_disk` wrote, or a folder of data files.

    Args:
        path: The hub's name, such as `openai/gsm8k`, or the folder.
        split: Such as `train`. A folder to which `save_to_disk` wrote a single split is taken as it is.
        subset: The configuration, where a hub dataset has several, such as `main`.
    """

    def __init__(self, path: str, split: str = "train", subset: str | None = None) -> None:
        self.path = path
        self.split = split
        self.subset = subset

    @property
    def name(self) -> str:
        return f"{self.path}[{self.split}]"

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return cast(dict[str, Any], self._dataset[row])

    def digest(self) -> str | None:
        """The fingerprint that `datasets` keeps: of the files, or of what was saved."""
        fingerprint: str = self._dataset._fingerprint
        return fingerprint

    @cached_property
    def _dataset(self) -> Any:
        import datasets

        if not self.path or len(self.path) > MOST_LETTERS:
            raise UserError(f"`path` is {self.path!r:.200}, and no dataset has such a name; check it")
        if (Path(self.path) / "dataset_info.json").exists():  # one split that `save_to_disk` wrote
            return self._saved()
        if (Path(self.path) / "dataset_dict.json").exists():
            splits = self._saved()
            if self.split not in splits:
                raise UserError(
                    f"{self.path} has no split {self.split!r}; it has {', '.join(splits)}."
                    f"{did_you_mean(self.split, splits)} Set `split`"
                )
            return splits[self.split]
        offline_unless_reached()
        try:
            return datasets.load_dataset(self.path, self.subset, split=self.split, trust_remote_code=False)
        except (datasets.exceptions.DatasetsError, ValueError, OSError, RuntimeError) as error:  # unknown name, host
            raise UserError(
                f"{self.name} with subset {self.subset} cannot be loaded ({one_line(error)});"
                " check `path`, `subset` and `split`"
            ) from error

    def _saved(self) -> Any:
        import datasets
        import pyarrow

        try:
            return datasets.load_from_disk(self.path)
        except (pyarrow.ArrowException, OSError, ValueError, LookupError, TypeError) as error:  # torn files of it
            raise UserError(f"{self.path} cannot be loaded ({one_line(error)}); save the dataset anew") from error


def digest_of_files(folder: Path, files: Sequence[Path]) -> str:
    """Of the files' bytes, and of where they lie in `folder`."""
    digest = hashlib.sha256()
    for path in files:
        if path.is_file():
            digest.update(f"{path.relative_to(folder)}\n{path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _existing(path: str, wanted: str, *endings: str, folder: bool = False) -> Path:
    found = Path(path)
    try:
        is_there = found.is_file() or (folder and found.is_dir())
    except (OSError, ValueError):  # no name that a file can have
        is_there = False
    if not is_there:
        raise UserError(f"`path` is {path!r:.200}{no_file(path, wanted, *endings)}")
    return found


def _once(pairs: list[tuple[str, Any]], place: str) -> dict[str, Any]:
    """An object of JSON, in which each key stands once."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{place} has the key {twice!r} twice, so one value would be lost; leave one of them")
    return found


def _start(line: bytes) -> str:
    return repr(line[:60].decode(errors="replace"))
