"""Which norms of a gradient are too large, and what is said where too many were."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlflow import UserError
from rlflow.controller.bad_updates import FEWEST, UpdateWatch
from rlflow.metrics import Metrics


def _update(watch: UpdateWatch, norm: float) -> bool:
    """Whether it is made."""
    largest = watch.largest("actor")
    watch.note("actor", norm, largest, None, Metrics().of(0), {})
    return norm <= largest


def test_updates_without_a_gradient_are_nothing_to_compare_the_first_with() -> None:
    watch = UpdateWatch(times=20.0)
    for _ in range(FEWEST):
        assert _update(watch, 0.0)
    assert _update(watch, 0.5)
    for _ in range(FEWEST):
        assert _update(watch, 0.5)
    assert not _update(watch, 11.0)


def test_rows_that_cannot_be_written_leave_the_message_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("no folder, as a disk that is full gives none")
    watch = UpdateWatch(folder=tmp_path, most=1)
    with pytest.raises(UserError, match=r"in 1 updates in a row, .*; its rows could not be written$"):
        _update(watch, math.nan)
