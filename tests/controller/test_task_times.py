"""The tasks whose times are metrics."""

from __future__ import annotations

from rlflow.controller.controller import time_metric
from rlflow.dag.tasks import Load, Reduce
from rlflow.values.layout import Layout


def test_loading_is_logged_as_a_time() -> None:
    assert time_metric(Load("batch", Layout((0,), 1))) == "time/load"


def test_reducing_metrics_is_not_logged_as_a_time() -> None:
    """It would begin to log of a step whose metrics are reduced, and a long run would hold every step's."""
    assert time_metric(Reduce((0,))) is None
