"""Rules for all source files."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEST = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)


def test_classes_have_distinct_names() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for folder in ("rlflow", "algorithms"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(places) > 300
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_names_of_tests_have_at_most_eighty_letters() -> None:
    names = [name for path in (ROOT / "tests").rglob("test_*.py") for name in TEST.findall(path.read_text())]
    assert len(names) > 3000
    assert [name for name in names if len(name) > 80] == []
