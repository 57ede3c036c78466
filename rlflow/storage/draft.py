"""A draft: a folder that several ranks write, each its own files, and that gets its name when it is complete."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlflow.errors import UserError, one_line
from rlflow.storage.safetensors_files import sha256, sync

RECORD = "rank-has-"  # how the names of ranks' records begin
WRITTEN, LEFT = "written", "left"  # what ranks record: their files are written; they read no more files
WAITED_FOR = {WRITTEN: "nothing was written", LEFT: "its files were still read, to write models,"}  # `by rank 1`
PAUSES = (0.01, 1.0)  # seconds between two looks at the folder: the first pause, and the longest


def of_rank(name: str, rank: int, world_size: int) -> str:
    """The name of a file that each rank writes one of, without its suffix: `logged-00000-of-00002`."""
    return f"{name}-{rank:05d}-of-{world_size:05d}"


@dataclass(frozen=True)
class Record:
    """The record of one rank's files.

    Attributes:
        rank: Number of the rank.
        files: SHA-256 and size of each file by name.
        more: Further JSON-able values for the rank that completes the folder.
        error: Reason why the rank could not write; None if it could.
    """

    rank: int
    files: dict[str, tuple[str, int]] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


class Draft:
    """A folder while it is written, on one rank.

    Args:
        target: Path of the folder when it is complete.
        rank: This process's rank.
        nodes: Name of the machine of every rank of the job, by rank.
        timeout_s: Seconds that other ranks may take longer than this rank.
    """

    def __init__(self, target: Path, rank: int, nodes: Mapping[int, str], timeout_s: float) -> None:
        self.target = target
        self.path = target.with_name(f"{target.name}.draft")
        self.rank = rank
        self.nodes = nodes
        self._timeout_s = timeout_s

    def open(self) -> None:
        """Make an empty folder; called by one rank, before the others write.

        `complete` first moves an older folder of the same name aside. If the run was killed just then, the older folder
        gets its name back here.
        """
        before = self._before
        if before.exists() and not self.target.exists():
            before.rename(self.target)
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)

    def file_records(self, digests: Mapping[str, str]) -> dict[str, tuple[str, int]]:
        """Digest and size of files by name. A file with an empty digest is synced to the disk and read."""
        records = {}
        for name, digest in digests.items():
            file = self.path / name
            if not digest:
                sync(file)
            records[name] = digest or sha256(file), file.stat().st_size
        return records

    def add(self, record: Record, part: str = WRITTEN) -> None:
        """Write the record of this rank, which then writes no more files. If the disk is full, the record is empty.

        Args:
            record: Record of this rank.
            part: `WRITTEN` when the rank's files are written, `LEFT` when it reads no files any more.

        Raises:
            OSError: The record could not be written.
        """
        target = self._record(record.rank, part)
        unnamed = target.with_suffix(".part")
        try:
            unnamed.write_text(json.dumps(asdict(record)))
            unnamed.rename(target)
        except OSError:
            unnamed.unlink(missing_ok=True)
            target.touch()
            raise

    def report(
        self,
        error: BaseException | None,
        record: Callable[[], Record] | None = None,
        written: Iterable[Path] = (),
        part: str = WRITTEN,
    ) -> None:
        """Write the record of this rank, or of its error.

        Args:
            error: Reason why the rank could not write its files; None if it could.
            record: Function that makes the record; None for a record without files.
            written: Files to remove if there is an error, to make room for its record.
            part: See `add`.
        """
        if error is None:
            self.add(Record(self.rank) if record is None else record(), part)
            return
        for path in written:
            path.unlink(missing_ok=True)
        self.add(Record(self.rank, error=not_written(error, self.target, self.rank, self.nodes[self.rank])), part)

    def collect(self, ranks: Iterable[int], part: str = WRITTEN) -> list[Record]:
        """Wait for the records of all `ranks`, and return them in the order of ranks.

        Args:
            ranks: Ranks that write a record.
            part: See `add`.

        Raises:
            UserError: A rank recorded an error, or wrote no record in time.
            OSError: A record is damaged; the error has the file's name.
        """
        missing, found = set(ranks), {}
        began, pause = time.monotonic(), PAUSES[0]
        while True:
            present = {entry.name for entry in os.scandir(self.path)}
            for rank in [rank for rank in missing if self._record(rank, part).name in present]:
                found[rank] = self._read(rank, part)
                missing.remove(rank)
                if (error := found[rank].error) is not None:
                    raise UserError(error)
            if not missing:
                break
            if time.monotonic() - began > self._timeout_s:
                late = ", ".join(f"{rank} on {self.nodes[rank]}" for rank in sorted(missing))
                raise UserError(
                    f"{self.target} is not complete: {self._timeout_s:g} s after the others, {WAITED_FOR[part]} by rank"
                    f" {late}; look at that disk, or raise `strategy.init_args.timeout_s`"
                )
            time.sleep(pause)
            pause = min(2 * pause, PAUSES[1])
        return [found[rank] for rank in sorted(found)]

    def complete(self) -> None:
        """Rename the draft to `target`, when no rank writes or reads it; an older folder of that name is removed."""
        for record in self.path.glob(f"{RECORD}*.json"):
            record.unlink()
        for path in (*self.path.rglob("*"), self.path):
            sync(path)
        before = self._before
        shutil.rmtree(before, ignore_errors=True)
        if self.target.exists():
            self.target.rename(before)
        self.path.rename(self.target)
        for folder in (self.target.parent, self.target.parent.parent):  # a run's first draft also made the parent
            sync(folder)
        shutil.rmtree(before, ignore_errors=True)

    def discard(self) -> None:
        """Remove the draft. No rank may write it then: a file written meanwhile would keep the folder."""
        shutil.rmtree(self.path, ignore_errors=True)

    @property
    def _before(self) -> Path:
        return self.target.with_name(f"{self.target.name}.before")

    def _read(self, rank: int, part: str) -> Record:
        file = self._record(rank, part)
        try:
            if not (text := file.read_text()):
                full = OSError(errno.ENOSPC, "", self.path)
                return Record(rank, error=not_written(full, self.target, rank, self.nodes[rank]))
            fields = json.loads(text)
            files = {name: (digest, size) for name, (digest, size) in fields["files"].items()}
            return Record(**{**fields, "files": files})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OSError(f"{file} is damaged ({one_line(error)})") from error

    def _record(self, rank: int, part: str) -> Path:
        return self.path / f"{RECORD}{part}-{rank:05d}.json"


def not_written(error: BaseException, target: Path, rank: int, node: str) -> str:
    """The error line for a rank that could not write."""
    if isinstance(error, UserError):
        return str(error)
    reason = one_line(error)
    if isinstance(error, OSError) and error.errno:
        reason, target = os.strerror(error.errno), Path(error.filename or target)
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    fix = "free some space there" if full else "look at that disk"
    return (
        f"{target} cannot be written by rank {rank} on {node}: {reason}; what was saved before is still there:"
        f" {fix}, and continue with `--trainer.ckpt_path last`"
    )
