"""Sources of a dataset's rows: JSON Lines and Parquet files, Hugging Face datasets, lists, map-style torch datasets.

`as_source` makes a source from any form of `data.train`. No file is opened before the first row is read. A row is a
dict of values that JSON can hold (text, numbers, lists, dicts, null), since ranks send rows to each other as JSON:

    {"question": "2+3=", "answer": "5", "metadata": {"difficulty": 1}}
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from itertools import accumulate, groupby
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, BinaryIO, TypeGuard, cast

import torch.distributed as dist

from rlflow.data.pictures import portable
from rlflow.errors import ConfigPlace, UserError, did_you_mean, no_file, one_line, place
from rlflow.process.hub import offline_unless_reached

MOST_LETTERS = 1000  # of a path
MOST_OPEN = 64  # files of a folder; a process may often have 1,024 open
HELD_BYTES = 256 * 2**20  # of a Parquet dataset's row groups, as Arrow; one is held however large it is
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")  # with which names of files and folders begin
HUB = re.compile(r"([\w-][\w.-]*/[\w-]+(?:\.[\d.]+)?)(?:/([\w.-]+))?(?:\[(.+)\])?")  # owner/name/subset[split]


class Source(ABC):
    """A dataset's rows, numbered from 0 and read in any order. Subclass it for a source of your own:

        class Squares(Source):
            name = "squares"

            def __len__(self) -> int:
                return 100

            def __getitem__(self, row: int) -> dict[str, Any]:
                return {"question": f"{row}*{row}=", "answer": str(row * row)}

    A row must be the same at every reading and on every rank. Before the first step the ranks read all rows once, each
    a share of them, to check them; then each rank reads only the rows of its steps, in a thread ahead of the step.

    Attributes:
        name: Name of the dataset in error messages.
    """

    name: str = "the dataset"

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, row: int) -> dict[str, Any]: ...

    def read(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """The rows of these numbers, in this order, repeated ones too. Override it where reading many is cheaper."""
        return [self[row] for row in rows]

    def where(self, row: int) -> str:
        """The place of a row as error messages name it: `train.jsonl, line 8`."""
        return f"{self.name}, row {row}"

    def folder(self, row: int) -> Path | None:
        """Folder from which the paths of a row's pictures start; None for the working directory."""
        return None

    def digest(self) -> str | None:
        """A digest of everything that rows are made from; with an equal digest the check of all rows is not repeated.

        None if computing it costs as much as reading the rows: then every rank checks all of them in every run.
        """
        return None


class JSONL(Source):
    """JSON Lines: one JSON object on each line, in UTF-8; blank lines are not rows.

        {"question": "2+3=", "answer": "5"}
        {"question": "4-1=", "answer": "3"}

    The first access finds where each line begins. After that, only the line of a row is read. A line that is not a JSON
    object, or has a key twice, raises a `UserError` when it is read.

    Args:
        path: The file, or a folder. All `.jsonl` files in the folder and in its subfolders are read, in the order of
            their paths.
    """

    def __init__(self, path: str) -> None:
        self.path = self.name = path

    def __len__(self) -> int:
        return len(self._lines[0])

    def __getitem__(self, row: int) -> dict[str, Any]:
        files, starts, _, lengths = self._lines
        try:
            line = os.pread(self._open(files[row]).fileno(), lengths[row], starts[row])
        except FileNotFoundError as error:
            raise UserError(f"{self.where(row)} is gone: {one_line(error)}; put it back, and start again") from error
        except OSError as error:
            raise UserError(
                f"{self.where(row)} cannot be read: {one_line(error)}; make the file readable, and start again"
            ) from error
        if len(line) < lengths[row]:
            raise UserError(
                f"{self.where(row)} is gone: the file got shorter while the run read it; put it back, and start again"
            )
        try:
            # Bytes would be decoded with halves of characters, as some exports write emoji in place of UTF-8.
            value = json.loads(line.decode("utf-8-sig"), object_pairs_hook=partial(_once, place=self.where(row)))
            if b"\\ud" in line or b"\\uD" in line:  # half a character, perhaps
                json.dumps(value, ensure_ascii=False).encode()
        except UserError:
            raise
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError too, where the line is not UTF-8
            raise UserError(
                f"{self.where(row)} is not JSON ({one_line(error)}): {_start(line)}; correct or remove the line"
            ) from error
        if not isinstance(value, dict):
            raise UserError(
                f"{self.where(row)} is not a JSON object: {_start(line)}; write each row as {{column: value, ...}}"
            )
        return value

    def where(self, row: int) -> str:
        files, _, numbers, _ = self._lines
        return f"{self._paths[files[row]]}, line {numbers[row]}"

    def folder(self, row: int) -> Path | None:
        return self._files[self._lines[0][row]].parent

    def digest(self) -> str | None:
        """SHA-256 of the files' bytes and of their paths in the folder."""
        return digest_of_files(Path(self.path), self._paths)

    @cached_property
    def _paths(self) -> list[Path]:
        path = _existing(self.path, "a JSON Lines file or a folder of them", ".jsonl", ".json")
        if not path.is_dir():
            return [path]
        if found := sorted(path.rglob("*.jsonl")):
            return found
        raise UserError(f"`path` is {self.path!r}, which is a folder without a .jsonl file; give a JSON Lines file")

    @cached_property
    def _files(self) -> list[Path]:
        """The paths, made absolute, since code of the user may call `os.chdir`."""
        return [path.absolute() for path in self._paths]

    @cached_property
    def _open(self) -> Callable[[int], BinaryIO]:
        """Function from a file's index to the open file; those used last stay open, others until nobody reads them."""
        files = self._files
        return lru_cache(MOST_OPEN)(lambda which: files[which].open("rb"))

    @cached_property
    def _lines(self) -> tuple[array[int], array[int], array[int], array[int]]:
        """Four arrays with an entry for each row: index of its file, byte offset, line number (from 1), and bytes."""
        files, offsets, numbers, lengths = array("i"), array("q"), array("q"), array("q")
        for which in range(len(self._paths)):
            file = self._open(which)
            file.seek(0)
            offset = 0
            for number, line in enumerate(file, start=1):
                if line.strip():
                    files.append(which)
                    offsets.append(offset)
                    numbers.append(number)
                    lengths.append(len(line.removesuffix(b"\n")))
                offset += len(line)
        return files, offsets, numbers, lengths


class Parquet(Source):
    """A Parquet file, or a folder of them. It is read by row groups; the last ones are cached, up to 256 MiB as Arrow.

    Args:
        path: The file or folder. All files must have the same schema.
    """

    def __init__(self, path: str) -> None:
        self.path = self.name = path
        self._held: OrderedDict[int, Any] = OrderedDict()  # tables of row groups, by the groups' numbers
        self._lock = Lock()  # the next step's rows are read while others are

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.read([row])[0]

    def read(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """The rows of these numbers, in this order; each row group is read once, in whatever order its rows are given.

        Raises:
            UserError: A row group cannot be read.
        """
        import pyarrow

        found: dict[int, dict[str, Any]] = {}
        for group, of_group in groupby(sorted(set(rows)), key=self._group_of):
            first = self._ends[group - 1] if group else 0
            try:
                table = self._table(group)
                for row in of_group:
                    found[row] = portable(table.slice(row - first, 1).to_pylist()[0])
            except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
                raise UserError(
                    f"rows {first} and on of {self.path} cannot be read ({one_line(error)}); write the file again"
                ) from error
        return [found[row] for row in rows]

    def folder(self, row: int) -> Path | None:
        path = self._existing
        return path if path.is_dir() else path.parent

    def digest(self) -> str | None:
        """SHA-256 of the files' bytes and of their paths in the folder."""
        path = self._existing
        return digest_of_files(path, sorted(path.rglob("*")) if path.is_dir() else [path])

    @cached_property
    def _existing(self) -> Path:
        return _existing(self.path, "a Parquet file or a folder of them", ".parquet").absolute()

    @cached_property
    def _groups(self) -> list[Any]:
        """The row groups of all files, in Arrow's order of files."""
        import pyarrow
        from pyarrow import parquet

        path = self._existing
        try:
            dataset = parquet.ParquetDataset(path)
            self._schema = dataset.schema
            return [group for file in dataset.fragments for group in file.split_by_row_group()]
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{self.path} is not Parquet ({one_line(error)}); check `path`") from error

    @cached_property
    def _ends(self) -> list[int]:
        """For each row group the rows up to its end, over all files: 100, 200, 250 for 100, 100 and 50 rows."""
        return [*accumulate(group.row_groups[0].num_rows for group in self._groups)]

    def _group_of(self, row: int) -> int:
        if not 0 <= row < len(self):
            raise IndexError(row)
        return bisect_right(self._ends, row)

    def _table(self, group: int) -> Any:
        """A row group as an Arrow table; cached, and safe to call from several threads."""
        with self._lock:
            if group not in self._held:
                self._held[group] = self._groups[group].to_table(schema=self._schema).combine_chunks()
            self._held.move_to_end(group)
            while len(self._held) > 1 and sum(table.nbytes for table in self._held.values()) > HELD_BYTES:
                self._held.popitem(last=False)
            return self._held[group]


class _LoadedDataset(Source):
    """Rows of a `datasets.Dataset` that is loaded already."""

    def __init__(self, dataset: Any, name: str) -> None:
        self._dataset, self.name = dataset, name

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.read([row])[0]

    def read(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        columns = self._dataset[list(rows)]
        return [portable(dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)]

    def digest(self) -> str | None:
        """The dataset's fingerprint, which `datasets` computes from its files and transforms."""
        return cast(str, self._dataset._fingerprint)


class HuggingFace(_LoadedDataset):
    """A dataset of the Hugging Face hub, a folder that `save_to_disk` wrote, or a folder of data files.

    It is loaded when the first row is read. A dataset that cannot be loaded, or lacks the split, raises a `UserError`.

    Args:
        path: The name on the hub, such as `openai/gsm8k`, or the folder.
        split: The split, such as `train`. It is ignored for a folder to which `save_to_disk` wrote a single split.
        subset: The configuration of a hub dataset that has several, such as `main`.
    """

    def __init__(self, path: str, split: str = "train", subset: str | None = None) -> None:
        self.path = path
        self.split = split
        self.subset = subset
        self.name = f"{path}[{split}]"

    @cached_property
    def _dataset(self) -> Any:
        import datasets

        if not self.path or len(self.path) > MOST_LETTERS:
            raise UserError(f"`path` is {self.path!r:.200}, and no dataset has such a name; check it")
        if _is_saved(Path(self.path)):
            found = self._saved()
            if not isinstance(found, Mapping):  # a single split
                return found
            if self.split not in found:
                raise UserError(
                    f"{self.path} has no split {self.split!r}; it has {', '.join(found)}."
                    f"{did_you_mean(self.split, found)} Set `split`"
                )
            return found[self.split]
        offline_unless_reached()
        try:
            return datasets.load_dataset(self.path, self.subset, split=self.split, trust_remote_code=False)
        except (datasets.exceptions.DatasetsError, ValueError, OSError, RuntimeError) as error:  # unknown name, host
            raise UserError(
                f"{self.name} with subset {self.subset} cannot be loaded ({one_line(error)}), and is not a file or"
                " folder here; check `path`, `subset` and `split`"
            ) from error

    def _saved(self) -> Any:
        import datasets
        import pyarrow

        try:
            return datasets.load_from_disk(self.path)
        except (pyarrow.ArrowException, OSError, ValueError, LookupError, TypeError) as error:  # torn files of it
            raise UserError(f"{self.path} cannot be loaded ({one_line(error)}); save the dataset again") from error


WHOLE_SAMPLERS = {"SequentialSampler", "RandomSampler", "NoneType"}  # of a loader, which draw every row


if TYPE_CHECKING:
    from _typeshed import SupportsLenAndGetItem
    from lightning.pytorch import LightningDataModule

    Rows = SupportsLenAndGetItem[Any]  # a list of dicts, a `datasets.Dataset`, a map-style dataset of torch
    DataLike = Source | str | os.PathLike[str] | Rows | LightningDataModule
else:
    DataLike = str | Source  # what a config can write; jsonargparse tries `str` first, and imports no path then


def as_source(data: DataLike, of: str = "data.train", split: str = "train") -> Source:
    """The `Source` of a dataset in any form that `PromptData` takes; no file is read yet.

        as_source("data/train.jsonl")                  JSONL
        as_source("openai/gsm8k/main[test]")           HuggingFace, subset `main`, split `test`
        as_source([{"question": "2+3=", "answer": "5"}])

    Args:
        data: A `Source`; the path of a JSON Lines or Parquet file, or of a folder of them; a dataset of the hub, as
            `owner/name`, `owner/name/subset`, or one of these followed by `[split]`; a `datasets.Dataset`; a list of
            dicts; a map-style dataset of torch; a `LightningDataModule`.
        of: The setting that `data` is the value of, for error messages.
        split: The split to read if the data has several and names none.

    Raises:
        UserError: The data has another form, or no file or folder is where a path says.
    """
    if isinstance(data, Source):
        return data
    if isinstance(data, str | os.PathLike):
        found = _named(os.fspath(data), of, split)
        place(found, ConfigPlace(of.rpartition(".")[2], {"path": of}))
        return found
    if is_data_module(data):
        return as_source(datasets_of(data, of, split)[0], of, split)
    bases = {f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in type(data).__mro__}
    kind = f"`{of}` is of type {type(data).__name__}"
    if "datasets.DatasetDict" in bases:
        splits = ", ".join(cast(Mapping[str, Any], data))
        raise UserError(f"{kind}, which has the splits {splits}; give one of them, such as dataset[{split!r}]")
    if bases & {"datasets.IterableDataset", "datasets.IterableDatasetDict", "torch.IterableDataset"}:
        raise UserError(
            f"{kind}, which streams, and rows are drawn from all over the data; load it whole (`streaming=False`), or"
            " give a list of its rows"
        )
    if "datasets.Dataset" in bases:
        return _LoadedDataset(data, f"`{of}`")
    if isinstance(data, Mapping) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise UserError(f"{kind}; give a list of dicts, a dataset, or the path of a file")
    return _Listed(cast("Rows", data), f"`{of}`")


def is_data_module(data: object) -> TypeGuard[LightningDataModule]:
    """Whether `data` is a `LightningDataModule`, of `lightning` or `pytorch_lightning`; imports neither."""
    return any(base.__name__ == "LightningDataModule" for base in type(data).__mro__)


def datasets_of(module: LightningDataModule, of: str = "data.train", split: str = "train") -> tuple[Any, Any]:
    """The dataset of `split` of a `LightningDataModule`; and for `train` its validation dataset, None if it has none.

    Calls `prepare_data` in the first rank of each machine, before that starts the others or while those of an earlier
    run wait, then `setup` in all. Uses only the `dataset` of its loaders, not their batches, order or `collate_fn`.

    Args:
        module: The module.
        of: The setting that it is the value of, for error messages.
        split: The split that it must have: `train`, `validation`, `test` or `predict`.

    Raises:
        UserError: The module has no loader of `split`, or a loader has no dataset or a sampler that leaves rows out; or
            it has a `prepare_data`, and torchrun or Slurm started several ranks of this machine.
    """
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ  # vLLM too sets the other variable
    ranks = os.environ.get("LOCAL_WORLD_SIZE" if by_torchrun else "SLURM_STEP_TASKS_PER_NODE", "1")  # such as 2(x16)
    if ranks.partition("(")[0] != "1" and type(module).prepare_data is not _base_of(module).prepare_data:
        raise UserError(
            f"`{of}` is a {type(module).__name__} with a `prepare_data`, and torchrun or Slurm started several ranks of"
            " this machine, and these do not wait for each other; run it in a command before, and leave it out of the"
            " class"
        )
    if os.environ.get("LOCAL_RANK", "0") == "0":
        module.prepare_data()
    if dist.is_initialized():  # by an earlier run of this script, whose ranks all call this
        dist.barrier()
    module.setup(split if split in ("test", "predict") else "fit")
    method = "val_dataloader" if split == "validation" else f"{split}_dataloader"
    found = _loaded_by(module, method, of)
    if found is None:
        raise UserError(f"`{of}` is a {type(module).__name__} without a `{method}`; give it one")
    return found, _loaded_by(module, "val_dataloader", "data.validation") if split == "train" else None


def _base_of(module: LightningDataModule) -> Any:
    return next(base for base in type(module).__mro__ if base.__name__ == "LightningDataModule")


class _Listed(Source):
    """Rows of a list of dicts or of a map-style torch dataset, as they are after a round trip through JSON."""

    def __init__(self, rows: Rows, name: str) -> None:
        self._rows, self.name = rows, name

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        try:
            found = self._rows[row]
        except Exception as error:  # the user's own code
            raise UserError(
                f"{self.where(row)} cannot be read ({type(error).__name__}: {one_line(error)}); correct the"
                " dataset's code"
            ) from error
        if not isinstance(found, Mapping):
            raise UserError(
                f"{self.where(row)} is {found!r:.60}, not a mapping; give each row as {{column: value, ...}}"
            )
        return cast(dict[str, Any], json.loads(row_as_json(portable(dict(found)), self.where(row))))

    def digest(self) -> str | None:
        """SHA-256 of a list's rows as JSON; None for other datasets, and for rows that JSON cannot hold."""
        if not isinstance(self._rows, list | tuple):
            return None
        digest = hashlib.sha256()
        try:
            for row in self._rows:
                digest.update(json.dumps(row).encode() + b"\n")
        except (TypeError, ValueError, RecursionError):
            return None
        return digest.hexdigest()


def _loaded_by(module: LightningDataModule, method: str, of: str) -> Any:
    """The dataset of the loader that `method` of a data module returns; None if it returns none or is not overridden.

    Raises:
        UserError: It returns several loaders, one without a dataset, or one whose sampler may leave rows out.
    """
    own = getattr(module, method)
    if getattr(own, "__func__", None) is getattr(_base_of(module), method):  # which raises
        return None
    loader = own()
    if isinstance(loader, list | tuple) and len(loader) < 2:
        loader = loader[0] if loader else None
    if loader is None:
        return None
    if not hasattr(loader, "dataset"):
        raise UserError(
            f"`{of}` is a {type(module).__name__}, whose `{method}` gives {loader!r:.60}, not one loader with a dataset"
            "; let it give one, or give the dataset itself"
        )
    sampler = type(getattr(loader, "sampler", None)).__name__
    if sampler not in WHOLE_SAMPLERS:
        raise UserError(
            f"`{of}` is a {type(module).__name__}, whose `{method}` draws rows by {sampler}, and rlflow draws from the"
            " whole dataset; let the loader have a dataset of its rows, such as `torch.utils.data.Subset`"
        )
    return loader.dataset


def _named(text: str, of: str, split: str) -> Source:
    """The source of a path or of a name on the hub; a path that exists comes first."""
    path, ending = Path(text), Path(text).suffix
    try:
        is_folder, is_there = path.is_dir(), path.exists()
    except (OSError, ValueError):  # no name that a file can have
        is_folder = is_there = False
    if is_folder and text:
        return _of_folder(path, text, of, split)
    if ending in (".jsonl", ".json"):
        return JSONL(text)
    if ending == ".parquet":
        return Parquet(text)
    wanted = "a JSON Lines or Parquet file, a folder of them, or a dataset of the hub, such as openai/gsm8k/main"
    if is_there and path.is_file():
        raise UserError(f"`{of}` is {text!r:.200}, whose name ends in {ending!r}; give {wanted}")
    found = None if is_there else HUB.fullmatch(text)
    if found is None:
        raise UserError(f"`{of}` is {text!r:.200}{no_file(text, wanted)}. Give {wanted}")
    name, subset, of_hub = found.groups()
    return HuggingFace(name, of_hub or split, subset)


def _of_folder(path: Path, text: str, of: str, split: str) -> Source:
    """The source of a folder: written by `save_to_disk`, or with files of one form and one split, else refused."""
    if _is_saved(path):
        return HuggingFace(text, split)
    forms = {".jsonl": JSONL, ".parquet": Parquet}
    files = [file for file in sorted(path.rglob("*")) if file.suffix in forms and file.is_file()]
    found = sorted({file.suffix for file in files})
    if len(found) != 1:
        what = f"files that end in {' and '.join(found)}" if found else "no file that ends in .jsonl or .parquet"
        raise UserError(f"`{of}` is {text!r:.200}, a folder with {what}; give a folder of one form, or a file")
    splits = sorted({name for file in files if (name := _split_of(file.relative_to(path)))})
    if len(splits) > 1:
        raise UserError(
            f"`{of}` is {text!r:.200}, a folder with files of the splits {' and '.join(splits)}; give the files of one"
        )
    return forms[found[0]](text)


def _split_of(file: Path) -> str | None:
    """The split with which a file's name begins, or else the name of the nearest folder: `test/0000.parquet`."""
    names = (re.split(r"[\W_]", name)[0] for name in (file.stem, *(folder.name for folder in file.parents)))
    return next((name for name in names if name in SPLITS), None)


def _is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` of a `datasets.Dataset`, or of several by their splits, wrote a folder."""
    return any((folder / name).exists() for name in ("dataset_info.json", "dataset_dict.json"))


def row_as_json(row: Mapping[str, Any], place: str) -> str:
    """A row as the JSON text that ranks send each other.

    Raises:
        UserError: A column holds what JSON cannot, such as a date, bytes, an image or half a character; it is named.
    """
    try:
        return _json(row)
    except (TypeError, ValueError, RecursionError) as error:
        for column, value in row.items():
            try:
                _json({column: value})
            except (TypeError, ValueError, RecursionError):
                raise UserError(
                    f"{place}: column `{column}` is {value!r:.60} ({one_line(error)}), so the row cannot travel between"
                    " ranks; write it as a text or numbers, or remove the column"
                ) from error
        raise


def _json(row: Mapping[str, Any]) -> str:
    text = json.dumps(row)
    if "\\ud" in text:  # half a character, perhaps
        json.dumps(row, ensure_ascii=False).encode()
    return text


def digest_of_files(folder: Path, files: Sequence[Path]) -> str:
    """SHA-256 of each file's path in `folder`, size and bytes; names in `files` that are not files are skipped."""
    digest = hashlib.sha256()
    for path in files:
        if path.is_file():
            digest.update(f"{path.relative_to(folder)}\n{path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _existing(path: str, wanted: str, *endings: str) -> Path:
    """The file or folder at a path; a `UserError` if there is none."""
    found = Path(path)
    try:
        is_there = bool(path) and (found.is_file() or found.is_dir())
    except (OSError, ValueError):  # no name that a file can have
        is_there = False
    if not is_there:
        raise UserError(f"`path` is {path!r:.200}{no_file(path, wanted, *endings)}")
    return found


def _once(pairs: list[tuple[str, Any]], place: str) -> dict[str, Any]:
    """The dict of a JSON object, for `json.loads`; refuses an object that has a key twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{place} has the key {twice!r} twice, so one value would be lost; leave one of them")
    return found


def _start(line: bytes) -> str:
    return repr(line[:60].decode(errors="replace"))
