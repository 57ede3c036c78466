"""A reward by tests: it runs the program in a response in a sandbox."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

from rlflow.errors import UserError
from rlflow.rewards.reward import OnError, SampleReward, read_column
from rlflow.worker import Limits, Sandbox

_FENCE = re.compile(r"((?:(?!```).)*)(`{3,})([^`]*)")  # a line with three backticks once, and the language after them
_PYTHON = ("py", "python", "python3")
# The program and the tests come by the standard input; that all of them ran is known by a word at the end.
_HARNESS = """
import json, sys
given = json.loads(sys.stdin.read())
names = {"__name__": "__main__"}
program, tests, word = (given.pop(part) for part in ("program", "tests", "word"))
exec(compile(program, "program", "exec"), names)
exec(compile(tests, "tests", "exec"), names)
print("\\n" + word)
"""


class CodeTests(SampleReward):
    """The share of a row's tests that the Python program in a response passes.

    The program is the last block of code in the response, between fences of three backticks, that names Python or
    no language. Without such a block the score is 0. A policy may learn to deceive tests in Python, for example with
    objects that equal all others. Prefer pairs of input and output: a program never sees both.

    Args:
        tests: Column of the tests. Either Python code that runs after the program and raises if the program is wrong;
            it is one test. Or a list of `{"input": ..., "output": ...}` for a program that reads its standard input and
            prints. Outputs are compared without the whitespace at the ends of lines.
        timeout_s: Time limit of a test.
        memory_mb: Memory limit of each process of a program, in MB.
        max_concurrent: Maximum number of programs that run at the same time on each rank.
        all_or_nothing: Score 1 if all tests pass, and else 0.
        on_error: `raise`, `zero` or `drop`; see `Reward`. A program that is wrong, slow or too large is not an error.

    Raises:
        UserError: This system cannot isolate a program, see `Sandbox`.
    """

    def __init__(
        self,
        tests: str = "tests",
        timeout_s: float = 5.0,
        memory_mb: int = 1024,
        max_concurrent: int = 1,
        all_or_nothing: bool = False,
        on_error: OnError = "raise",
    ) -> None:
        super().__init__(on_error, max_concurrent)
        self.tests = tests
        self.reads = {tests: False}
        self.all_or_nothing = all_or_nothing
        self._sandbox = Sandbox(Limits(timeout_s=timeout_s, memory_mb=memory_mb))

    @property
    def waits_for_others(self) -> bool:
        return True

    def check(self, row: dict[str, Any]) -> None:
        self._tests(row)

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        tests = self._tests(row)
        program = program_in(text)
        if program is None:
            return 0.0
        if isinstance(tests, str):
            return float(self._passes(program, tests))
        passed = [self._prints(program, str(test["input"]), str(test["output"])) for test in tests]
        return float(all(passed)) if self.all_or_nothing else sum(passed) / len(passed)

    def _tests(self, row: dict[str, Any]) -> Any:
        tests = read_column(row, self.tests)
        if not isinstance(tests, str) and not _are_pairs(tests):
            raise UserError(
                f"column `{self.tests}` is {tests!r:.60}; {self} takes a text of Python, or a list of mappings with"
                " `input` and `output`; correct or remove the row"
            )
        return tests

    def _passes(self, program: str, tests: str) -> bool:
        word = secrets.token_hex(16)
        ran = self._sandbox.run(_HARNESS, json.dumps({"program": program, "tests": tests, "word": word}))
        return ran.succeeded and ran.last.rstrip().endswith(f"\n{word}")

    def _prints(self, program: str, given: str, wanted: str) -> bool:
        ran = self._sandbox.run(program, given, keep_kb=2 + len(wanted.encode()) // 512)  # twice as long, and more
        return ran.succeeded and _lines(ran.output) == _lines(wanted)


def program_in(text: str) -> str | None:
    """The last block of code in a text that names Python or no language; None without one."""
    program, opened, inline, indent, language, lines = None, "", False, "", "", list[str]()
    for line in text.replace("\r\n", "\n").split("\n"):
        before, fence, info = found.groups() if (found := _FENCE.fullmatch(line)) else ("", "", "")
        begins, words = not before.strip(), info.lower().split()
        named = "".join(words[:1])
        names, of_python = info.strip().isidentifier(), named in _PYTHON
        # Text before a fence is common, as in `Answer:```python`; it may also only speak of one, before the block.
        if not opened:
            opens = begins or (len(words) <= 1 and not named.endswith((":", ".", ",")))
        else:
            opens = inline and begins and (of_python or (names and language not in _PYTHON))
        if opens:
            opened, inline, indent, language, lines = fence, not begins, before if begins else "", named, []
        elif (
            len(fence) >= len(opened) > 0
            and begins
            and len(before) <= len(indent) + 3
            and not names  # which opens a block in the program's text; `</answer>` is after it
        ):
            program = "\n".join([*lines, ""]) if language in ("", *_PYTHON) else program
            opened = ""
        else:
            lines.append(line.removeprefix(indent))
    return program


def _are_pairs(tests: Any) -> bool:
    return (
        isinstance(tests, list)
        and len(tests) > 0
        and all(isinstance(test, Mapping) and {"input", "output"} <= test.keys() for test in tests)
    )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
