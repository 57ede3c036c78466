"""One run at a time in a run's folder, and none in a folder of somebody else's."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from rlflow.errors import UserError

LOCK = "rlflow.lock"
LOG = Path("logs") / "rank0.log"  # by which a run's folder of before there was a lock is known
PATIENCE_S = 5.0  # a run that was killed may take so long to be gone


class FolderLock:
    """A lock on a run's folder, which ends with the process that holds it, however that ends.

    By POSIX record locks: they hold between the processes of a machine, and between machines on NFS and on parallel
    file systems that are mounted with locks. Where there are none, nothing is locked.

    A run that is refused before it uses the folder leaves nothing: what the lock made is gone when it is let go.

    Args:
        folder: Of the run.
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
        removed where this lock made it and nothing lies in it.
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
            FileNotFoundError: It was removed meanwhile.
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


def require_own(folder: Path) -> None:
    """Refuse a folder with files in it that no run has made: a run would move them away.

    Raises:
        UserError: It is one.
    """
    if not folder.is_dir() or (folder / LOCK).exists() or (folder / LOG).exists():
        return
    first = None
    with suppress(FileNotFoundError):  # made by a run that is refused, and gone again
        first = min((path.name for path in folder.iterdir() if path.name != LOCK), default=None)
    if first is not None:
        raise UserError(
            f"`trainer.run_dir` is {str(folder)!r}, which has files that no run made ({first!r} is one), and a run's"
            " folder is its own; name one that is new or empty"
        )


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
