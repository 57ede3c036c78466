"""Processes for code that may be slow, hang or do harm.

A `Worker` runs rewards and environments with limits of time, memory and file size, and is killed with all that it
started. A `Sandbox` runs programs that a model wrote; it also hides the network, files and other processes from them.
"""

from rlflow.worker.sandbox import Sandbox, SandboxResult
from rlflow.worker.worker import (
    Limits,
    Worker,
    WorkerDied,
    WorkerError,
    WorkerPool,
    WorkerRaised,
    WorkerTimeout,
)

__all__ = [
    "Limits",
    "Sandbox",
    "SandboxResult",
    "Worker",
    "WorkerDied",
    "WorkerError",
    "WorkerPool",
    "WorkerRaised",
    "WorkerTimeout",
]
