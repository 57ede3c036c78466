"""What code that ran in workers may have left."""

from __future__ import annotations

import psutil

from rlflow.worker.worker import CHILD


def workers() -> list[psutil.Process]:
    """The processes of workers of this process, and not those of pools of ranks."""
    return [child for child in psutil.Process().children() if str(CHILD) in child.cmdline()]
