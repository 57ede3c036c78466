"""Count the lines that a variation of an algorithm takes: python benchmarks/line_counts.py

Lines with code, that is without blank lines, comments and docstrings, of the variation's file, of the functions of
`rlflow.functional` that it alone needs, and of the lists that name both. Imports, decorators and settings are code. The
last line is the same as JSON.
"""

from __future__ import annotations

import ast
import io
import json
import tokenize
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
VARIATIONS = {  # class: its file, and the functions that it alone needs
    "DrGRPO": ("dr_grpo", ()),
    "RLOO": ("rloo", ("rloo_advantages",)),
    "GSPO": ("gspo", ("gspo_loss", "gspo_is_clipped")),
    "CISPO": ("cispo", ("cispo_loss",)),
    "REINFORCEPlusPlusBaseline": ("reinforce_plus_plus_baseline", ()),
}


@dataclass(frozen=True)
class Lines:
    """Lines of one variation: its class with imports, its registration, and its mathematics."""

    algorithm: int
    registration: int
    functional: int

    @property
    def total(self) -> int:
        """All three."""
        return self.algorithm + self.registration + self.functional


def code_lines(source: str) -> set[int]:
    """The numbers of the lines that have code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines -= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return lines


def function_lines(source: str, names: tuple[str, ...]) -> int:
    """Number of lines with code in these functions of a module, decorators included."""
    code, count = code_lines(source), 0
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            count += len(code & set(range(first, (node.end_lineno or first) + 1)))
    return count


def count(name: str) -> Lines:
    """The lines of a variation."""
    file, functions = VARIATIONS[name]
    pure = ROOT / "rlflow" / "functional"
    named = tuple(f"import {each} as {each}" for each in (name, *functions))
    registries = [path.read_text(encoding="utf-8") for path in (ROOT / "algorithms/__init__.py", pure / "__init__.py")]
    mathematics = [path.read_text(encoding="utf-8") for path in sorted(pure.glob("*.py"))]
    return Lines(
        algorithm=len(code_lines((ROOT / "algorithms" / f"{file}.py").read_text(encoding="utf-8"))),
        registration=sum(line.endswith(named) for source in registries for line in source.splitlines()),
        functional=sum(function_lines(source, functions) for source in mathematics),
    )


def main() -> None:
    """Print the table."""
    counted = {name: count(name) for name in VARIATIONS}
    print(f"{'variation':28}{'class':>8}{'registration':>14}{'functional':>12}{'total':>8}")
    for name, lines in counted.items():
        print(f"{name:28}{lines.algorithm:>8}{lines.registration:>14}{lines.functional:>12}{lines.total:>8}")
    print(json.dumps({name: asdict(lines) | {"total": lines.total} for name, lines in counted.items()}))


if __name__ == "__main__":
    main()
