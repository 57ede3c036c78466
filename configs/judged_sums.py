"""Sums with an answer that is right or wrong: `kto.yaml` names what is here."""

from __future__ import annotations

import random
from typing import Any


def draw(draws: random.Random) -> dict[str, Any]:
    """A row: a sum of three digits, an answer, and whether it is right; the half of them is."""
    a, b, c = (draws.randint(0, 9) for _ in range(3))
    label = draws.random() < 0.5
    wrong = draws.choice([each for each in range(-9, 19) if each != a + b - c])
    return {"question": f"{a} + {b} - {c}", "answer": str(a + b - c if label else wrong), "label": label}
