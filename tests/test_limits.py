"""The pages on limits and on simulation have the numbers that are computed now."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import divisions, limits

DOCS = Path(__file__).parents[1] / "docs"


def test_the_page_on_limits_has_what_is_computed_now() -> None:
    lines = (DOCS / "limits.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("|")] == list(limits.table())


@pytest.mark.slow
def test_the_page_on_simulation_has_the_divisions_that_are_predicted_now() -> None:
    assert "\n".join(divisions.table()) in (DOCS / "simulate.md").read_text()
