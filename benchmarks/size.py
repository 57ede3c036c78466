"""Count the lines of the package: python -m benchmarks.size

Lines of code are those without blank lines, comments and docstrings. The share of docstrings is their lines over those
of code and docstrings together. The last line is the same as JSON.
"""

from __future__ import annotations

import ast
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.line_counts import code_lines

ROOT = Path(__file__).parent.parent
FOLDERS = ("rlflow", "algorithms")


@dataclass(frozen=True)
class Size:
    """The contents of some source files.

    Attributes:
        code: Lines of code.
        docstrings: Lines of docstrings.
        files: Modules.
        classes: Classes, those inside others included.
    """

    code: int = 0
    docstrings: int = 0
    files: int = 0
    classes: int = 0

    @property
    def docstring_share(self) -> float:
        """Docstring lines over lines of code and docstrings."""
        return self.docstrings / max(1, self.code + self.docstrings)

    def __add__(self, other: Size) -> Size:
        return Size(
            *(ours + theirs for ours, theirs in zip(asdict(self).values(), asdict(other).values(), strict=True))
        )

    def __str__(self) -> str:
        return (
            f"{self.code:,} lines of code, {self.files} files, {self.classes} classes,"
            f" docstring share {self.docstring_share:.2f}"
        )


def size_of(source: str) -> Size:
    """The size of one module."""
    nodes = list(ast.walk(ast.parse(source)))
    documented = [node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    docstrings = (node.body[0] for node in documented if ast.get_docstring(node) is not None)
    lines = sum((text.end_lineno or text.lineno) - text.lineno + 1 for text in docstrings)
    return Size(len(code_lines(source)), lines, 1, sum(isinstance(node, ast.ClassDef) for node in nodes))


def size_of_folder(folder: Path) -> Size:
    """The size of all modules of a folder."""
    return sum((size_of(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))), Size())


def main() -> None:
    """Print the size of each folder, and of both together."""
    sizes = {name: size_of_folder(ROOT / name) for name in FOLDERS}
    sizes["together"] = sum(sizes.values(), Size())
    for name, size in sizes.items():
        print(f"{name}: {size}")
    print(json.dumps({name: {**asdict(size), "docstring_share": size.docstring_share} for name, size in sizes.items()}))


if __name__ == "__main__":
    main()
