"""The folder of a run: what is in it and where, whether it can be written, and its lock."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import stat
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from rlflow.errors import UserError, one_line
from rlflow.process.status import SUPERVISED_VARIABLE

LOCK = "rlflow.lock"
PATIENCE_S = 5.0  # a run that was killed may take so long to be gone
TRIES = 100  # of making a folder where one is that says there is none


@dataclass(frozen=True)
class RunFolder:
    """The paths of a run's results.

    Attributes:
        path: The folder; its name is the run's.
    """

    path: Path

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An empty folder at `path`; what was there before is renamed to `<path>-1`, `-2`, ..."""
        if path.exists() and any(each.name != LOCK for each in path.iterdir()):
            number = 1
            while (kept := path.with_name(f"{path.name}-{number}")).exists():
                number += 1
            path.rename(kept)
        path.mkdir(parents=True, exist_ok=True)
        return cls(path)

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def inputs(self) -> Path:
        """What nodes read in some steps, see `rlflow.controller.inputs`."""
        return self.path / "inputs"

    @property
    def model(self) -> Path:
        """The trained model in Hugging Face form, with its tokenizer."""
        return self.path / "model"

    def model_of(self, role: str) -> Path:
        """The trained model of a role that the rollout engine does not follow, such as the critic."""
        return self.path / f"model-{role}"

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint, in a folder named by its step."""
        return self.path / "checkpoint"

    @property
    def logs(self) -> Path:
        """What libraries print, a file for each rank."""
        return self.path / "logs"

    @property
    def traces(self) -> Path:
        """The ranks' task traces, and `trace.json`, all of them in one, where `rlflow trace` has joined them."""
        return self.path / "traces"

    @property
    def validation(self) -> Path:
        """The metrics of `rlflow validate`."""
        return self.path / "validation.json"

    @property
    def summary(self) -> Path:
        """The run in a few numbers."""
        return self.path / "summary.json"

    def write_summary(self, numbers: dict[str, Any], started_from: Path) -> dict[str, Any]:
        """Write `summary.json`; a run that started from another run's model carries on its `seconds`.

        Args:
            numbers: Numbers of this run.
            started_from: The model that training started from.
        """
        run_before = RunFolder(started_from.parent)
        carries_on = started_from == run_before.model and run_before.summary.is_file()
        earlier = _seconds_of(run_before.summary) if carries_on else {}
        seconds = earlier | {self.path.name: round(seconds_since_process_start(), 1)}
        summary = numbers | {"seconds": seconds}
        self.summary.write_text(json.dumps(summary, indent=2) + "\n")
        return summary


class FolderLock:
    """A lock on a run's folder, which ends with the process that holds it, however that ends.

    By POSIX record locks: they hold between the processes of a machine, and between machines on NFS and on parallel
    file systems that are mounted with locks. Where there are none, nothing is locked.

    A run that is refused before it uses the folder leaves nothing: what the lock made is gone when it is let go.

    Args:
        folder: Folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[str] | None = None
        self._made: set[Path] = set()  # folders
        self._removes = False  # whether `release` removes what was made

    def take(self) -> None:
        """Lock the folder, which is made if need be; the one that was locked before, and has been moved, is let go.

        Raises:
            UserError: Another run holds it.
        """
        if self._file is not None and self._lies_there(self._file):
            return  # opened once more, it would be let go with the first that is closed
        until = time.monotonic() + PATIENCE_S
        while True:
            late = time.monotonic() > until
            try:
                if self._try():
                    return
            except FileNotFoundError:  # the folder was moved meanwhile, or removed by a run that was refused
                if late:
                    raise
            except BlockingIOError as held:
                if late:
                    raise UserError(
                        f"`trainer.run_dir` is {str(self._folder)!r}, where another run writes ({held}); give this"
                        " run a folder of its own, or wait for the end of that one"
                    ) from held
            time.sleep(0.1)

    def use(self) -> None:
        """The run begins to write: the folder stays."""
        self._removes = False

    def release(self) -> None:
        """Let other runs have the folder, if this one holds it; one that was not used is as it was before.

        The file is removed while it is locked: who waits for it sees that it is gone, and begins anew. A folder is
        removed where this lock made it and it is empty.
        """
        file, self._file = self._file, None
        if file is None:
            return
        made: list[Path] = []
        with suppress(OSError):
            if self._removes and self._lies_there(file):
                (self._folder / LOCK).unlink()
                made = sorted(self._made, reverse=True)
                _remove_empty(made)
        with suppress(OSError):  # of a disk that is full
            file.close()
        _remove_empty(made)  # NFS keeps a file that is open, under another name

    def _try(self) -> bool:
        """Whether the folder is locked now.

        Raises:
            BlockingIOError: Another process has it.
            FileNotFoundError: It was removed by another run.
        """
        self._make()
        with ExitStack() as stack:
            try:
                file, made = stack.enter_context((self._folder / LOCK).open("x+", encoding="utf-8")), True
            except FileExistsError:
                file, made = stack.enter_context((self._folder / LOCK).open("r+", encoding="utf-8")), False
            locks = _lock(file)
            if not self._lies_there(file):
                return False
            stack.pop_all()
        if self._file is not None:
            self._file.close()
        self._file, self._removes = file, made and locks
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        return True

    def _make(self) -> None:
        """Make the folder and those above, and note which were not there."""
        missing = [folder for folder in (self._folder, *self._folder.parents) if not folder.is_dir()]
        for folder in reversed(missing):
            try:
                folder.mkdir()
            except OSError:
                if not folder.is_dir():
                    raise
            else:
                self._made.add(folder)

    def _lies_there(self, file: IO[str]) -> bool:
        """Whether the file is that of the folder, which may have been moved or removed."""
        with suppress(FileNotFoundError):
            held = os.fstat(file.fileno())
            return held.st_nlink > 0 and os.path.samestat(held, (self._folder / LOCK).stat())
        return False


def require_folder(path: Path) -> None:
    """Refuse a folder that a run's results cannot go into; whether it can be made is tried, and nothing stays of it.

    Args:
        path: The run's.

    Raises:
        UserError: It cannot be made or written, or there is something that is no folder.
    """
    said = f"`trainer.run_dir` is {str(path)!r:.80}"
    try:
        if path.parts[0].startswith("~"):
            raise UserError(f"{said}, and `{path.parts[0]}` means a home in a shell alone; write the whole path")
        left = TRIES
        while (found := _mode(path)) is None:
            missing = next((each for each in path.parents[::-1] if _mode(each) is None), path)
            if missing.is_symlink():
                raise UserError(f"{said}, a link to what is not there; name a folder")
            try:  # under another name: ranks look at the same time, and none may see a folder come and go
                Path(tempfile.mkdtemp(prefix=".rlflow-", dir=missing.parent)).rmdir()
                return
            except (
                FileNotFoundError
            ):  # a run that was refused has removed what it had made, and another may make it anew
                left -= missing.parent.is_dir()
                if not left:  # it is there, and takes no folders, such as `/proc`
                    raise
        if not stat.S_ISDIR(found):
            raise UserError(f"{said}, which is a file; name a folder")
        elif not os.access(path, os.W_OK | os.X_OK):
            raise UserError(f"{said}, which cannot be written; name a folder that can be")
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise UserError(f"{said}, which cannot be made ({reason}); name a folder that can be written") from error


def require_own(folder: Path) -> None:
    """Refuse a folder with files in it that no run has made: a run would move them away.

    Raises:
        UserError: It is one.
    """
    if not folder.is_dir() or (folder / LOCK).exists():
        return
    first = None
    with suppress(FileNotFoundError):  # made by a run that is refused, and gone again
        first = min((path.name for path in folder.iterdir() if path.name != LOCK), default=None)
    if first is not None:
        raise UserError(
            f"`trainer.run_dir` is {str(folder)!r}, which has files that no run made ({first!r} is one), and a run's"
            " folder is its own; name one that is new or empty"
        )


def from_here(path: Path) -> Path:
    """A path for a line to the user: from the folder where this process is, if it is in there."""
    with suppress(FileNotFoundError, ValueError):  # that folder is gone, or the path lies elsewhere
        return path.relative_to(Path.cwd())
    return path


def seconds_since_process_start() -> float:
    """Wall-clock seconds since this process began, or the one that it was forked from; its imports included."""
    began = psutil.Process(os.getppid() if SUPERVISED_VARIABLE in os.environ else os.getpid())
    return time.time() - began.create_time()


def _seconds_of(summary: Path) -> dict[str, float]:
    """What an earlier run took, by name; nothing if its summary is damaged, since the run that asks is done."""
    try:
        return {str(name): float(value) for name, value in json.loads(summary.read_text())["seconds"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        print(f"warning: {summary} is damaged ({one_line(error)}), so this run's summary has not the times of that one")
        return {}


def _mode(path: Path) -> int | None:
    """Mode of what is at the path; None if nothing does."""
    with suppress(FileNotFoundError):
        return path.stat().st_mode
    return None


def _remove_empty(folders: list[Path]) -> None:
    """Up to the first that is not empty."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _lock(file: IO[str]) -> bool:
    """Lock it; False where the file system has no locks.

    Raises:
        BlockingIOError: Another process holds it, which the error names.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.seek(0)
        raise BlockingIOError(file.read() or "it has just begun") from error
    except OSError:
        return False
    return True
