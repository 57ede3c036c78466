"""Who is told of tasks: the trace, the metrics, callbacks, and a rank's status; and what an error says of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rlflow.callbacks.hooks import Callbacks
from rlflow.dag.tasks import Load, RunNode, SyncWeights, Task, TrainNode
from rlflow.errors import UserError
from rlflow.loggers.trace import Trace
from rlflow.metrics import Metrics
from rlflow.process.status import report


@dataclass(frozen=True)
class Observers:
    """Of one rank.

    Attributes:
        metrics: Of this rank, reduced once a step.
        trace: Of its tasks.
        callbacks: Told of tasks and nodes.
    """

    metrics: Metrics
    trace: Trace
    callbacks: Callbacks

    @contextmanager
    def watching(self, task: Task, step: int, rank: int) -> Iterator[None]:
        """Time a task, and say of an error where this rank stood."""
        started = time.perf_counter()
        report(rank, f"step {step + 1}, {task}")
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            error.add_note(f"rank {rank}, step {step}: {task}")
            raise
        ended = time.perf_counter()
        report(rank, f"step {step + 1}")
        self.trace.span(str(task), type(task).__name__, started, ended, step=step)
        metrics = self.metrics.of(step)
        if isinstance(task, RunNode | TrainNode):
            metrics.seconds(f"time/{task.node_id}", ended - started)
        elif isinstance(task, SyncWeights):
            metrics.seconds("time/sync", ended - started)
        elif isinstance(task, Load):
            metrics.seconds("time/load", ended - started)
