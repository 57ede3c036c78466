"""What can be wrong with a graph, reported all at once, each with file and line."""

from __future__ import annotations

import os
from dataclasses import dataclass

from rlflow.errors import UserError


@dataclass(frozen=True)
class Problem:
    """One mistake: where it is written, and what was found, why it cannot work, what to do."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{place(self.file, self.line)}: {self.message}"


class GraphError(UserError):
    """All problems of one graph, one line each; `args` are the `Problem`s."""

    def __init__(self, *problems: Problem) -> None:
        assert problems
        super().__init__(*problems)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The problems, by file and line."""
        return self.args

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        return "\n  ".join([f"{len(self.problems)} problems in the graph:", *map(str, self.problems)])


def place(file: str, line: int) -> str:
    """`file:line` as an editor opens it, the file relative to the working directory where it lies below it."""
    relative = os.path.relpath(file)
    return f"{file if relative.startswith(os.pardir) else relative}:{line}"
