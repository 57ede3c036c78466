"""Tests that notice each planted fault: runs the test on the code with the fault, where it must fail.

    python -m benchmarks.learning.noticed [FAULT ...]

The result of each is kept in `runs/learn/faults/`; without names, those that are not there are run. The table of
`docs/maintainers/learning_faults.md` is written when all are there. The exit code is 0 if every test noticed its fault.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.learning import table
from benchmarks.learning.faults import FAULTS, Fault
from benchmarks.learning.runs import ROOT, code

FOUND = ROOT / "runs" / "learn" / "faults"
PAGE = ROOT / "docs" / "maintainers" / "learning_faults.md"
# By a number that is another, or by a check of the package's own; a fault that cannot run shows nothing.
FAILED = re.compile(
    r"^FAILED (\S+?)(?:\[.*\])? - (?:assert|AssertionError|\S+(?:WeightSyncError|UserError))", re.MULTILINE
)


def main(names: list[str]) -> int:
    """Run what is wanted, and sum up."""
    FOUND.mkdir(parents=True, exist_ok=True)
    for name in names or [name for name in FAULTS if not kept(name).exists()]:
        kept(name).write_text(json.dumps({"code": code(), "failed": failing(name)}), encoding="utf-8")
        print(f"{name}: {', '.join(read(name)) or 'NOT NOTICED'}", flush=True)
    there = [name for name in FAULTS if kept(name).exists()]
    for name in filter(of_other_code, there):
        print(f"{name}: found with other code; name it to look again")
    if there == list(FAULTS):
        table.write(PAGE, "faults", lines())
    return 0 if there == list(FAULTS) and all(map(read, FAULTS)) else 1


def failing(name: str) -> list[str]:
    """The tests that fail on the code with the fault, without their parameters."""
    command = [sys.executable, "-m", "benchmarks.learning.faults", name, "pytest", "-q", "-p", "no:cacheprovider"]
    wide = {**os.environ, "COLUMNS": "1000"}  # pytest cuts reasons off at the edge
    ended = subprocess.run([*command, FAULTS[name].test], cwd=ROOT, env=wide, capture_output=True, text=True)
    if ended.returncode not in (0, 1):  # pytest did not run the tests
        raise RuntimeError(ended.stdout + ended.stderr)
    return failed_tests(ended.stdout)


def failed_tests(output: str) -> list[str]:
    """Names of tests in pytest's summary that failed by an assertion, each once."""
    return list(dict.fromkeys(FAILED.findall(output)))


def lines() -> list[str]:
    """The table: what is wrong, and who notices."""
    return ["| fault | test that fails |", "|---|---|", *(f"| {f.what} | {by(n, f)} |" for n, f in FAULTS.items())]


def by(name: str, fault: Fault) -> str:
    """The test that failed."""
    if fault.test.partition("[")[0] not in read(name):
        return "**none**"
    file, test = fault.test.split("::")
    return f"`{test}` in `{file}`"


def read(name: str) -> list[str]:
    """The stored findings."""
    found: list[str] = json.loads(kept(name).read_text(encoding="utf-8"))["failed"]
    return found


def of_other_code(name: str) -> bool:
    """Whether a result is of other code than there is."""
    return bool(json.loads(kept(name).read_text(encoding="utf-8"))["code"] != code())


def kept(name: str) -> Path:
    """The file of a fault's result."""
    return FOUND / f"{name}.json"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
