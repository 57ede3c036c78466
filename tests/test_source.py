"""What holds of all source files."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_classes_have_distinct_names() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for folder in ("rlflow", "algorithms"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(places) > 300
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_the_glossary_has_at_most_40_words_and_all_are_used() -> None:
    concepts = (ROOT / "docs/concepts.md").read_text()
    before, glossary = concepts.split("\n## Glossary\n")
    terms = re.findall(r"^\| ([a-z][a-z -]*) \|", glossary, flags=re.MULTILINE)
    assert 30 < len(terms) <= 40
    assert terms == sorted(set(terms))
    texts = [before, *(path.read_text() for path in (ROOT / "docs").glob("*.md") if path.name != "concepts.md")]
    texts += [path.read_text() for path in (ROOT / "rlflow").rglob("*.py")]
    words = " ".join(texts).lower()
    assert [term for term in terms if not re.search(rf"\b{term}s?\b", words)] == []
