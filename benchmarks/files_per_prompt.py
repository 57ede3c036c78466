"""Count the files that a reader opens to follow one prompt: python -m benchmarks.files_per_prompt

A small GRPO run on one rank; from the task that loads the rows of step 2 to the end of the sync of step 3, the files
of rlflow and its algorithms in which a function ran, these functions, and their lines of code. `--files` lists the
files. The last line is the same as JSON.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from benchmarks.line_counts import code_lines
from benchmarks.size import FOLDERS
from rlflow import Callback, Trainer
from rlflow.algorithms import GRPO

ROOT = Path(__file__).parent.parent
BEGINS, ENDS = ("load", 2), ("sync", 3)  # kind of task, and step


class Walk(Callback):
    """Notes the functions that run between two tasks of this rank."""

    def __init__(self) -> None:
        self.ran: set[CodeType] = set()
        self._in_last = False

    def on_task_start(self, trainer: Any, module: Any, task: str, step: int) -> None:
        kind = task.split()[0]
        if (kind, step) == BEGINS:
            sys.setprofile(self._note)
        elif self._in_last:
            sys.setprofile(None)
        self._in_last = (kind, step) == ENDS

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.ran.add(frame.f_code)


def reward(response: str) -> float:
    """The share of digits in a response."""
    return sum(each.isdigit() for each in response) / max(1, len(response))


def functions_that_ran() -> dict[Path, set[int]]:
    """First lines of the functions that ran, by file."""
    walk, found = Walk(), defaultdict(set)
    rows = [{"prompt": f"{i}+{i}="} for i in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(f"{folder}/run", max_steps=4, accelerator="cpu", callbacks=[walk])
        trainer.fit(GRPO("tiny", reward=reward, group_size=4, max_response_length=16), rows)
    for code in walk.ran:
        file = Path(code.co_filename).resolve()
        if any(file.is_relative_to(ROOT / name) for name in FOLDERS) and not code.co_name.startswith("<"):
            found[file].add(code.co_firstlineno)
    return dict(found)


def lines_of(file: Path, first_lines: set[int]) -> int:
    """Lines of code of the functions of a file that begin at these lines, each line once."""
    source, lines = file.read_text(encoding="utf-8"), set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first in first_lines:
                lines.update(range(first, (node.end_lineno or first) + 1))
    return len(lines & code_lines(source))


def main() -> None:
    """Print how many files, functions and lines of code there are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", action="store_true", help="list the files")
    asked = parser.parse_args()
    found = functions_that_ran()
    lines = {file: lines_of(file, first_lines) for file, first_lines in found.items()}
    if asked.files:
        for file in sorted(found):
            print(f"{file.relative_to(ROOT)}: {len(found[file])} functions, {lines[file]} lines")
    functions = sum(map(len, found.values()))
    print(f"{len(found)} files, {functions} functions, {sum(lines.values()):,} lines of code")
    print(json.dumps({"files": len(found), "functions": functions, "lines": sum(lines.values())}))


if __name__ == "__main__":
    main()
