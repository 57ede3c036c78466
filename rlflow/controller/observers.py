"""Who learns of tasks: the trace, the metrics, callbacks, and a rank's status; and what an error says of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rlflow.callbacks.hooks import Callbacks
from rlflow.controller.inputs import NodeInputs
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
        inputs: What nodes read is kept there, of some steps.
    """

    metrics: Metrics
    trace: Trace
    callbacks: Callbacks
    inputs: NodeInputs

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
            error.add_note(f"rank {rank}, step {step + 1}: {' '.join(str(task).split())}")
            raise
        ended = time.perf_counter()
        report(rank, f"step {step + 1}")
        self.trace.span(str(task), type(task).__name__, started, ended, step=step)
        if (name := _time_of(task)) is not None:  # once a step is reduced, nothing may begin to log of it again
            self.metrics.of(step).seconds(name, ended - started)


def _time_of(task: Task) -> str | None:
    """The metric of a task's time, if it has one."""
    if isinstance(task, RunNode | TrainNode):
        return f"time/{task.node_id}"
    if isinstance(task, SyncWeights):
        return "time/sync"
    return "time/load" if isinstance(task, Load) else None
