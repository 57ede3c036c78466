"""What the tests of pure functions share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def known() -> dict[str, Any]:
    """The known answers, by name; each says its source."""
    answers: dict[str, Any] = json.loads((Path(__file__).parents[1] / "known_answers.json").read_text())
    return answers
