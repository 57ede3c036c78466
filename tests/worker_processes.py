"""Processes and files that code in workers may have left."""

from __future__ import annotations

from contextlib import suppress

import psutil

from rlflow.worker.worker import CHILD


def workers() -> list[psutil.Process]:
    """The processes of workers of this process, and not those of pools of ranks. One whose worker is gone ends."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
            if str(CHILD) in child.cmdline():
                found.append(child)
    return found
