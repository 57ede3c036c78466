"""Code that may be slow, hang or do harm, in a process that can be killed."""

from rlflow.worker.sandbox import Ran, Sandbox
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
    "Ran",
    "Sandbox",
    "Worker",
    "WorkerDied",
    "WorkerError",
    "WorkerPool",
    "WorkerRaised",
    "WorkerTimeout",
]
