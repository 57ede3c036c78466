"""Gradient norms that are too large."""

from __future__ import annotations

from rlflow.controller.training import FEWEST, UpdateWatch
from rlflow.metrics import Metrics


def _update(watch: UpdateWatch, norm: float) -> bool:
    """Whether it is made."""
    largest = watch.largest("actor")
    watch.note("actor", norm, largest, None, Metrics().of(0))
    return norm <= largest


def test_updates_without_a_gradient_are_nothing_to_compare_the_first_with() -> None:
    watch = UpdateWatch(times=20.0)
    for _ in range(FEWEST):
        assert _update(watch, 0.0)
    assert _update(watch, 0.5)
    for _ in range(FEWEST):
        assert _update(watch, 0.5)
    assert not _update(watch, 11.0)
