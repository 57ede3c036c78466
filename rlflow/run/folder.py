"""The folder of a run: the paths of its results, whether it can be written, and its lock."""

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
PATIENCE_S = 5.0  # seconds that the process of a killed run may take to end
TRIES = 100  # attempts to make a folder in a parent that exists and yet says that it does not


@dataclass(frozen=True)
class RunFolder:
    """The paths of a run's results.

    Attributes:
        path: The folder; its name is the name of the run.
    """

    path: Path

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Make an empty folder at `path`; an older folder there is renamed to `<path>-1`, `-2`, ..."""
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
    def hparams(self) -> Path:
        """The hyperparameters that the module kept by `save_hyperparameters`."""
        return self.path / "hparams.json"

    @property
    def code(self) -> Path:
        """The versions of packages and the commit, a line for each start of the run, see `rlflow.run.code_state`."""
        return self.path / "code.jsonl"

    @property
    def graph(self) -> Path:
        """The algorithm's graph, drawn in Mermaid and as a table."""
        return self.path / "graph.md"

    @property
    def inputs(self) -> Path:
        """Stored inputs of nodes in some steps, see `rlflow.controller.inputs`."""
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
        """The run's checkpoints, each in a folder named by its step."""
        return self.path / "checkpoint"

    @property
    def logs(self) -> Path:
        """The output of libraries, a file for each rank."""
        return self.path / "logs"

    @property
    def traces(self) -> Path:
        """The ranks' traces of tasks, and `trace.json`, into which `rlflow trace` joins them."""
        return self.path / "traces"

    @property
    def validation(self) -> Path:
        """The metrics of `rlflow validate`."""
        return self.path / "validation.json"

    @property
    def summary(self) -> Path:
        """The summary of the run: a few numbers."""
        return self.path / "summary.json"

    def write_summary(self, numbers: dict[str, Any], started_from: Path) -> dict[str, Any]:
        """Write `summary.json`. If this run started from another run's model, `seconds` has that run's times as well.

        Args:
            numbers: Numbers of this run.
            started_from: Path of the model from which training started.
        """
        run_before = RunFolder(started_from.parent)
        carries_on = started_from == run_before.model and run_before.summary.is_file()
        earlier = _seconds_of(run_before.summary) if carries_on else {}
        seconds = earlier | {self.path.name: round(seconds_since_process_start(), 1)}
        summary = numbers | {"seconds": seconds}
        self.summary.write_text(json.dumps(summary, indent=2) + "\n")
        return summary


class FolderLock:
    """A lock on a run's folder. It ends with the process that holds it, however the process ends.

    It is a POSIX record lock. Such locks hold between processes of one machine, and between machines on NFS and on
    parallel file systems that are mounted with locks. On a file system without locks nothing is locked.

    A run that is refused before it uses the folder leaves nothing behind: `release` removes what the lock made.

    Args:
        folder: Folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[str] | None = None
        self._made: set[Path] = set()  # folders
        self._removes = False  # whether `release` removes what was made

    def take(self) -> None:
        """Lock the folder, and make it if it does not exist. The lock of a folder that has been moved away is released.

        Raises:
            UserError: Another run holds the lock.
        """
        if self._file is not None and self._lies_there(self._file):
            return  # not opened again: closing either file would release the lock
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
        """Note that the run begins to write, so that `release` does not remove the folder."""
        self._removes = False

    def release(self) -> None:
        """Release the lock, if this process holds it. If the run did not use the folder, restore its former state.

        The lock's file is removed while it is locked: a process that waits for it sees that it is gone, and tries
        again. Folders that this lock made are removed if they are empty.
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
        with suppress(OSError):  # the disk may be full
            file.close()
        _remove_empty(made)  # again: on NFS an open file still exists under another name

    def _try(self) -> bool:
        """Whether the folder is locked now.

        Raises:
            BlockingIOError: Another process has the lock.
            FileNotFoundError: Another run removed the folder.
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
        """Make the folder and its parents, and note which of them did not exist."""
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
        """Whether `file` is still the lock's file in the folder, which may have been moved or removed."""
        with suppress(FileNotFoundError):
            held = os.fstat(file.fileno())
            return held.st_nlink > 0 and os.path.samestat(held, (self._folder / LOCK).stat())
        return False


def require_folder(path: Path) -> None:
    """Refuse a folder that cannot take a run's results. If it does not exist, making one is tried and undone.

    Args:
        path: Path of the run's folder.

    Raises:
        UserError: The folder cannot be made or written, or the path is not a folder.
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
            try:  # under another name, since other ranks look at the same time and must not see the folder
                Path(tempfile.mkdtemp(prefix=".rlflow-", dir=missing.parent)).rmdir()
                return
            except (
                FileNotFoundError
            ):  # a run that was refused has removed what it had made, and another may make it again
                left -= missing.parent.is_dir()
                if not left:  # the parent exists and takes no folders, such as `/proc`
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
    """Refuse a folder with files that no run has made, since this run would move them away.

    Raises:
        UserError: The folder has such files.
    """
    if not folder.is_dir() or (folder / LOCK).exists():
        return
    first = None
    with suppress(FileNotFoundError):  # another run that was refused may have removed it
        first = min((path.name for path in folder.iterdir() if path.name != LOCK), default=None)
    if first is not None:
        raise UserError(
            f"`trainer.run_dir` is {str(folder)!r}, which has files that no run made ({first!r} is one), and a run's"
            " folder is its own; name one that is new or empty"
        )


def from_here(path: Path) -> Path:
    """A path as shown to the user: relative to the working directory, if it is below it."""
    with suppress(FileNotFoundError, ValueError):  # the working directory is gone, or the path is not below it
        return path.relative_to(Path.cwd())
    return path


def seconds_since_process_start() -> float:
    """Wall-clock seconds since this process began, imports included; if it is supervised, since its parent began."""
    began = psutil.Process(os.getppid() if SUPERVISED_VARIABLE in os.environ else os.getpid())
    return time.time() - began.create_time()


def _seconds_of(summary: Path) -> dict[str, float]:
    """Seconds of an earlier run, by name; empty, with a warning, if its summary is damaged."""
    try:
        return {str(name): float(value) for name, value in json.loads(summary.read_text())["seconds"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        print(f"warning: {summary} is damaged ({one_line(error)}), so this run's summary has not the times of that one")
        return {}


def _mode(path: Path) -> int | None:
    """Mode of the file or folder at the path; None if there is none."""
    with suppress(FileNotFoundError):
        return path.stat().st_mode
    return None


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders in order, up to the first that is not empty."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _lock(file: IO[str]) -> bool:
    """Lock a file; returns False where the file system has no locks.

    Raises:
        BlockingIOError: Another process holds the lock; the error names it.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.seek(0)
        raise BlockingIOError(file.read() or "it has just begun") from error
    except OSError:
        return False
    return True
