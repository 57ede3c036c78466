"""Numbers that stand in papers, or were worked out by hand from their equations, for the formulas of the field.

Each file is about one kind of formula: `advantages`, `aggregation`, `importance_weights`, `kl`, `logprobs`, `losses`,
`normalization` and `returns`. A case has the `source` and the `equation`, what is `given` and the `answers`;
`schema.json` is the form of the files. rlflow's own functions are tested against them.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

SCHEMA = "schema.json"


@cache
def known_answers() -> dict[str, dict[str, Any]]:
    """All cases by their names, with `source`, `equation`, `given`, `answers` and sometimes a `note`."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(files(__name__).iterdir(), key=lambda each: each.name):
        if file.name.endswith(".json") and file.name != SCHEMA:
            cases = json.loads(file.read_text(encoding="utf-8"))
            found |= {name: case for name, case in cases.items() if not name.startswith("$")}
    return found


def numbers_of(name: str) -> dict[str, Any]:
    """The given numbers and the answers of a case, by name."""
    case = known_answers()[name]
    return {**case["given"], **case["answers"]}
