"""The table of faults: `make faults` runs every test here, remembers those that passed, and prints what was seen.

A module says which promise it shows, `pytestmark = pytest.mark.row("bad data")`. What is marked `faults` too is left
out of `make test`. A test that passed is run again when the package, its file or what files here share has changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.faults.rows import ROWS

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
STORE = PROJECT / "runs" / "faults.json"
SHARED = ("__init__.py", "conftest.py", "running.py")
LONGEST = 300  # characters of what was seen in a row of the table


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rows", metavar="NAMES", help="show these rows of the table, by parts of names; all where empty")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [item for item in items if item.path.is_relative_to(HERE)]
    for item in here:
        if _row(item) not in ROWS:
            raise pytest.UsageError(f"{item.nodeid} is marked with no row of {', '.join(ROWS)}")
    names = config.getoption("--rows", None)
    if names is None:
        return
    asked = [name.strip() for name in names.split(",")]
    stored = _stored()
    runs, left = [], []
    for item in here:
        of_row = any(name in _row(item) for name in asked)
        _tests[item.nodeid] = _row(item), item.path
        (runs if of_row and not _passed(stored.get(item.nodeid), item.path) else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = runs


@pytest.fixture
def seen(record_property: Callable[[str, Any], None]) -> Callable[[str], None]:
    """Gives the table a figure: what the test saw, in a few words."""
    return lambda text: record_property("seen", text)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.nodeid not in _tests:
        return
    _reports.setdefault(report.nodeid, []).append(report)
    if report.when == "teardown":  # so that a call that is stopped loses one test
        _store(report.nodeid, _reports.pop(report.nodeid))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if _tests and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK  # all have passed before


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    names = config.getoption("--rows", None)
    if names is None:
        return
    asked = [name.strip() for name in names.split(",")]
    terminalreporter.section("faults")
    for row, bar in ROWS.items():
        if any(name in row for name in asked):
            terminalreporter.write_line(_line(row, bar))


_reports: dict[str, list[pytest.TestReport]] = {}
_tests: dict[str, tuple[str, Path]] = {}  # row and file of each


def _row(item: pytest.Item) -> str:
    mark = item.get_closest_marker("row")
    return str(mark.args[0]) if mark and mark.args else ""


def _store(name: str, reports: list[pytest.TestReport]) -> None:
    """Keep what was seen of a test that came to its end."""
    stored = _stored() | {
        name: {
            "passed": all(report.passed for report in reports),
            "seconds": round(sum(report.duration for report in reports), 1),
            "seen": [str(text) for kind, text in reports[-1].user_properties if kind == "seen"],
            "digest": _digest(_tests[name][1]),
        }
    }
    STORE.parent.mkdir(exist_ok=True)
    STORE.write_text(json.dumps(stored, indent=1) + "\n")


def _line(row: str, bar: str) -> str:
    stored = _stored()
    of_row = {name: path for name, (of, path) in _tests.items() if of == row}
    passed = [stored[name] for name, path in of_row.items() if _passed(stored.get(name), path)]
    what = "; ".join(dict.fromkeys(text for each in passed for text in each["seen"]))
    what = what if len(what) <= LONGEST else f"{what[:LONGEST]} ..."
    took = sum(each["seconds"] for each in passed)
    state = f"{len(passed)} of {len(of_row)} tests passed, in {took:.0f} s" if of_row else "no test"
    return f"{row}: {state} | {bar}" + (f" | {what}" if what else "")


def _stored() -> dict[str, dict[str, Any]]:
    return json.loads(STORE.read_text()) if STORE.is_file() else {}


def _passed(stored: dict[str, Any] | None, path: Path) -> bool:
    """Whether a test passed with the code of now."""
    return stored is not None and stored["passed"] and stored["digest"] == _digest(path)


@cache
def _digest(path: Path) -> str:
    """Of what a test of this file depends on."""
    of_package = (file for folder in ("rlflow", "algorithms") for file in (PROJECT / folder).rglob("*.py"))
    return _sha256([*of_package, *(HERE / name for name in SHARED), path])


def _sha256(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in sorted(set(files)):
        digest.update(f"{file.relative_to(PROJECT)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]
