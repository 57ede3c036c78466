"""Cases of a test that `make test` leaves to `make test-all`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(fast: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases of a parametrized test, those that are not among `fast` marked `slow`.

    Args:
        fast: Some of the cases, in which a fault of what the test is about is seen.
        cases: Values, or tuples of them where the test takes several.
    """
    cases = list(cases)
    assert all(case in cases for case in fast), f"{fast} are not all among {cases}"
    marked = (
        (case if isinstance(case, tuple) else (case,), () if case in fast else pytest.mark.slow) for case in cases
    )
    return [pytest.param(*values, marks=marks) for values, marks in marked]
