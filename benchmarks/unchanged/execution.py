"""Runs Python with a revision's code, and nothing of this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.unchanged.revisions import Revision

LIMIT_S = 1800  # of one process; it may share the machine


def python(revision: Revision, arguments: list[str], folder: Path, log: Path) -> int:
    """Run Python with one thread; its exit code.

    Args:
        revision: Revision whose code is imported.
        arguments: Arguments of Python.
        folder: Folder in which it runs.
        log: File to which it prints. A file `.imported` next to it says where its processes took `rlflow` from.
    """
    imported = log.with_suffix(".imported")
    imported.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(revision.code),
        "UNCHANGED_IMPORTED": str(imported),
    }
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            return process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()  # the run's own processes end with it
            return process.wait()
