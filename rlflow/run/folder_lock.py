"""One run at a time in a run's folder, and none in a folder of somebody else's."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from contextlib import suppress
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

    Args:
        folder: Of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[str] | None = None

    def take(self) -> None:
        """Lock the folder, which is made if need be; the one that was locked before, and has been moved, is let go.

        Raises:
            UserError: Another run holds it.
        """
        if self._file is not None and self._lies_there(self._file):
            return  # opened once more, it would be let go with the first that is closed
        until = time.monotonic() + PATIENCE_S
        while True:
            self._folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # the folder was moved meanwhile
                file = (self._folder / LOCK).open("a+", encoding="utf-8")
                held_by = _locked_by_another(file)
                if held_by is None and self._lies_there(file):
                    break
                file.close()
                if held_by is not None and time.monotonic() > until:
                    raise UserError(
                        f"`trainer.run_dir` is {str(self._folder)!r}, where another run writes ({held_by}); give this"
                        " run a folder of its own, or wait for the end of that one"
                    )
            time.sleep(0.1)
        self.release()
        self._file = file
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()

    def _lies_there(self, file: IO[str]) -> bool:
        """Whether the file is that of the folder, which may have been moved."""
        path = self._folder / LOCK
        return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())

    def release(self) -> None:
        """Let other runs have the folder."""
        if self._file is not None:
            self._file.close()
            self._file = None


def require_own(folder: Path) -> None:
    """Refuse a folder with files in it that no run has made: a run would move them away.

    Raises:
        UserError: It is one.
    """
    if not folder.is_dir() or (folder / LOCK).exists() or (folder / LOG).exists():
        return
    first = min((path.name for path in folder.iterdir()), default=None)
    if first is not None:
        raise UserError(
            f"`trainer.run_dir` is {str(folder)!r}, which has files that no run made ({first!r} is one), and a run's"
            " folder is its own; name one that is new or empty"
        )


def _locked_by_another(file: IO[str]) -> str | None:
    """Who holds the lock; None if it is this process now, or if the file system has no locks."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        return file.read() or "it has just begun"
    except OSError:
        return None
    return None
