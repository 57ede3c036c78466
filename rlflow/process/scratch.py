"""The folder for a run's temporary files, removed by the process that waits for the run, however the run ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

SCRATCH_VARIABLE = "RLFLOW_SCRATCH"  # of the run's processes
PREFIX = "rlflow-scratch-"
NEW_S = 60.0  # one that is younger may not be locked yet


def make_scratch() -> Path:
    """The folder of this run, which stays locked while this process, or one that it forked, lives.

    Those of runs that were killed with the process that waited for them are removed first.
    """
    _sweep(Path(tempfile.gettempdir()))
    path = Path(tempfile.mkdtemp(prefix=PREFIX))
    fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX)  # it stays open
    os.environ[SCRATCH_VARIABLE] = str(path)
    return path


def scratch_folder() -> str | None:
    """Folder of this run's temporary files; None for Python's choice, in a process that nobody waits for."""
    given = os.environ.get(SCRATCH_VARIABLE)
    return given if given is not None and os.path.isdir(given) else None


def _sweep(temporary: Path) -> None:
    for left in temporary.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # of another user, or another process removes it
            if time.time() - left.stat().st_mtime < NEW_S:
                continue
            lock = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)
