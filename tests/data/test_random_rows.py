"""Rows that a function draws."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rlflow.data import RandomRows
from rlflow.errors import UserError


def number(draws: random.Random) -> dict[str, Any]:
    return {"number": draws.random()}


def test_a_row_follows_from_the_seed_and_its_number() -> None:
    rows = RandomRows(number, 3)
    assert len(rows) == 3
    assert rows.read([2, 0]) == [rows[2], rows[0]] == RandomRows(f"{__name__}.number", 5).read([2, 0])
    assert len({each["number"] for each in (*rows.read([0, 1, 2]), RandomRows(number, 3, seed=1)[0])}) == 4


def test_a_function_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match=rf"`draw` is '{__name__}\.numbers', but .* has no numbers"):
        RandomRows(f"{__name__}.numbers", 3)[0]
