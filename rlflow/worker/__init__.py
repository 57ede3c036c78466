"""Code that may be slow, hang or do harm, in a process that can be killed."""

from rlflow.worker.limits import Limits
from rlflow.worker.pool import WorkerPool
from rlflow.worker.sandbox import Ran, Sandbox
from rlflow.worker.worker import Worker, WorkerDied, WorkerError, WorkerRaised, WorkerTimeout

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
