"""What can be wrong with a graph, reported all at once, each with file and line."""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.dag.node import place
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
