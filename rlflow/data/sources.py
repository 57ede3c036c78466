"""Where a dataset's rows come from: files and Hugging Face datasets.

Nothing is opened before the first row is asked for. A row holds what JSON can carry, so it can travel between ranks.
"""

from __future__ import annotations

import json
import mmap
from abc import ABC, abstractmethod
from array import array
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from rlflow.errors import UserError, did_you_mean, one_line


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

    def where(self, row: int) -> str:
        """The place of a row as errors name it."""
        return f"{self.name}, row {row}"


class JSONL(Source):
    """One JSON object on each line. The file is mapped, not read: a row costs its own line. Blank lines are no rows.

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
        start = self._lines[0][row]
        end = self._content.find(b"\n", start)
        line = self._content[start : end if end >= 0 else None]
        try:
            value = json.loads(line)
        except ValueError as error:  # JSONDecodeError, and UnicodeDecodeError where the line is not UTF-8
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

    @cached_property
    def _content(self) -> mmap.mmap:
        with _existing(self.path).open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @cached_property
    def _lines(self) -> tuple[array[int], array[int]]:
        """The byte offset and the line number (from 1) of each row."""
        offsets, numbers = array("q"), array("q")
        if _existing(self.path).stat().st_size == 0:  # nothing can be mapped
            return offsets, numbers
        self._content.seek(0)
        offset = 0
        for number, line in enumerate(iter(self._content.readline, b""), start=1):
            if line.strip():
                offsets.append(offset)
                numbers.append(number)
            offset += len(line)
        return offsets, numbers


class Parquet(Source):
    """A Parquet file, or a folder of them. Its pages are compressed, so it is held in memory, as Arrow.

    Args:
        path: The file or folder.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    def name(self) -> str:
        return self.path

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return cast(dict[str, Any], self._table.slice(row, 1).to_pylist()[0])

    @cached_property
    def _table(self) -> Any:
        import pyarrow
        from pyarrow import parquet

        path = _existing(self.path, folder=True)
        try:
            return parquet.read_table(path).combine_chunks()
        except pyarrow.ArrowInvalid as error:
            raise UserError(f"{self.path} is not Parquet ({one_line(error)}); check `path`") from error


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

    @cached_property
    def _dataset(self) -> Any:
        import datasets

        if (Path(self.path) / "dataset_info.json").exists():  # one split that `save_to_disk` wrote
            return datasets.load_from_disk(self.path)
        if (Path(self.path) / "dataset_dict.json").exists():
            splits = datasets.load_from_disk(self.path)
            if self.split not in splits:
                raise UserError(
                    f"{self.path} has no split {self.split!r}; it has {', '.join(splits)}."
                    f"{did_you_mean(self.split, splits)} Set `split`"
                )
            return splits[self.split]
        try:
            return datasets.load_dataset(self.path, self.subset, split=self.split, trust_remote_code=False)
        except (datasets.exceptions.DatasetsError, ValueError, OSError) as error:  # unknown name, subset, split, host
            raise UserError(
                f"{self.name} with subset {self.subset} cannot be loaded ({one_line(error)});"
                " check `path`, `subset` and `split`"
            ) from error


def _existing(path: str, folder: bool = False) -> Path:
    found = Path(path)
    if not (found.exists() if folder else found.is_file()):
        raise UserError(f"no file {path} in {Path.cwd()}; check `path`")
    return found


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _start(line: bytes) -> str:
    return repr(line[:60].decode(errors="replace"))
