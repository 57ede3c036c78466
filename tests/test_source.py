"""Rules for all source files."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
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


def test_each_name_that_a_docstring_explains_is_in_the_code() -> None:
    trees = {
        path: ast.parse(path.read_text()) for top in ("rlflow", "algorithms") for path in (ROOT / top).rglob("*.py")
    }
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    classes = {node.name: node for _, node in nodes if isinstance(node, ast.ClassDef)}
    explained = [
        (f"{path.relative_to(ROOT)}:{node.lineno}", node, names)
        for path, node in nodes
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if (names := {*explained_by(ast.get_docstring(node) or "")})
    ]
    assert sum(len(names) for _, _, names in explained) > 3000
    missing = {place: names - names_in(node, classes) for place, node, names in explained}
    assert {place: names for place, names in missing.items() if names} == {}


def explained_by(docstring: str) -> Iterator[str]:
    """The names under `Args:` and `Attributes:`."""
    for section in re.findall(r"^(?:Args|Attributes):\n((?: {4}.*\n|\n)+)", docstring + "\n", re.MULTILINE):
        for names in re.findall(r"^ {4}(\w[\w, ]*):(?: |$)", section, re.MULTILINE):
            yield from names.split(", ")


def names_in(node: ast.AST, classes: dict[str, ast.ClassDef]) -> set[str]:
    """The names in the code of a function, or of a class and its base classes."""
    found = set[str]()
    for part in ast.walk(node):
        match part:
            case ast.arg(arg=name) | ast.Name(id=name) | ast.Attribute(attr=name) | ast.FunctionDef(name=name):
                found.add(name)
            case ast.Tuple(elts=[ast.Constant(value=str(name)), *_]):  # a field of a `ctypes.Structure`
                found.add(name)
    for base in node.bases if isinstance(node, ast.ClassDef) else ():
        if (name := ast.unparse(base).partition("[")[0].rpartition(".")[2]) in classes:
            found |= names_in(classes[name], classes)
    return found
