"""What stays of a step when it is over."""

from __future__ import annotations

from pathlib import Path

from rlflow.callbacks.hooks import Callbacks
from rlflow.controller.inputs import NodeInputs
from rlflow.controller.observers import Observers
from rlflow.dag.tasks import Load, Reduce
from rlflow.databuffer.transport import Transport
from rlflow.loggers.trace import Trace
from rlflow.metrics import Metrics
from rlflow.values.layout import Layout


def test_a_step_that_was_reduced_is_not_logged_of_again(tmp_path: Path) -> None:
    metrics, trace = Metrics(), Trace(tmp_path, rank=0)
    nobody = Callbacks([], None, None)  # type: ignore[arg-type]
    observers = Observers(metrics, trace, nobody, NodeInputs(None))
    with observers.watching(Load("batch", Layout((0,), 1)), 7, rank=0):
        pass
    with observers.watching(Reduce((0,)), 7, rank=0):
        assert "time/load" in metrics.reduce(7, Transport())
    trace.close()
    assert not metrics.of_later_steps(-1)  # a long run would hold every step's
    assert not metrics._steps
