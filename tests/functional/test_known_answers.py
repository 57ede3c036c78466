"""The known answers as data: their form, their sources, and that each of them is read by a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from rlflow import known_answers as room
from rlflow.known_answers import SCHEMA, known_answers

FILES = sorted(path for path in Path(room.__file__).parent.glob("*.json") if path.name != SCHEMA)
VALIDATOR = jsonschema.Draft202012Validator(json.loads((Path(room.__file__).parent / SCHEMA).read_text()))


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_a_file_of_known_answers_has_the_form_of_the_schema(file: Path) -> None:
    assert [error.message for error in VALIDATOR.iter_errors(json.loads(file.read_text()))] == []


@pytest.mark.parametrize("lacks", ["source", "equation", "given", "answers"])
def test_the_schema_refuses_a_case_without_a_part(lacks: str) -> None:
    case: dict[str, Any] = {"source": "by hand", "equation": "1 + x", "given": {"x": 1}, "answers": {"y": 2}}
    assert VALIDATOR.is_valid({"one": case})
    assert not VALIDATOR.is_valid({"one": {key: value for key, value in case.items() if key != lacks}})


def test_the_kinds_of_formulas_are_all_there() -> None:
    kinds = "advantages aggregation importance_weights kl logprobs losses normalization returns"
    assert [file.stem for file in FILES] == kinds.split()
    assert len(known_answers()) == sum(len(json.loads(file.read_text())) - 1 for file in FILES)  # no name twice


def test_every_known_answer_is_read_by_a_test() -> None:
    tests = Path(__file__).parents[1]
    text = "\n".join(path.read_text() for path in tests.rglob("test_*.py"))
    assert [name for name in known_answers() if f'"{name}"' not in text] == []
