"""The page on limits has what is computed now."""

from __future__ import annotations

from pathlib import Path

from benchmarks.limits import table

PAGE = Path(__file__).parents[1] / "docs" / "limits.md"


def test_the_page_on_limits_has_what_is_computed_now() -> None:
    assert [line for line in PAGE.read_text().splitlines() if line.startswith("|")] == list(table())
