"""Remembers the tests that passed on this code, for `make test-all`, and prints the measurements of each promise.

It runs the tests marked `slow`, which `make test` leaves out, and all that show a promise of the table of faults, which
a module names: `pytestmark = pytest.mark.row("bad data")`. A test that passed is run again when the package, a lock,
its file or a helper of its has changed. Figures are those of tests that passed: what each saw (`seen`), how many there
are (`counted`), from least to most (`measured`).
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.faults.promises import OTHERS, ROWS

HERE = Path(__file__).parent
PROJECT = HERE.parent
STORE = PROJECT / "runs" / "passed.json"
CODE = ("rlflow", "algorithms", "configs", "requirements/*.lock")
SHARED = (HERE / "conftest.py", HERE / "passed_tests.py")
LONGEST = 300  # characters of what was seen in a row of the table


def pytest_addoption(parser: pytest.Parser) -> None:
    rows = "run what has not passed of these rows of the table, by parts of names, all where empty, and print them"
    parser.addoption("--rows", metavar="NAMES", type=_rows, help=rows)
    part = "run every N-th test, beginning with the I-th; all where empty"
    parser.addoption("--part", metavar="I/N", type=_part, help=part)


@pytest.hookimpl(trylast=True)  # of what `-m` has left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    rows, part = config.getoption("--rows"), config.getoption("--part")
    if rows is None:
        if part is not None:
            raise pytest.UsageError("--part is of the tests of rows; give --rows, which may be empty")
        return
    for item in items:
        if _row(item) not in ROWS:
            raise pytest.UsageError(f"{item.nodeid} is marked with no row of {', '.join(ROWS)}")
    first, every = part or (1, 1)
    _tests.update((item.nodeid, (_row(item), item.path)) for item in items)
    chosen = [item for item in items if _row(item) in rows][first - 1 :: every]  # whatever has passed before
    stored = _stored()
    runs = [item for item in chosen if not _passed(stored.get(item.nodeid), item.path)]
    config.hook.pytest_deselected(items=[item for item in items if item not in runs])
    items[:] = runs


@pytest.fixture
def seen(record_property: Callable[[str, Any], None]) -> Callable[[str], None]:
    """Gives the table what the test saw, in a few words; what several saw is printed once."""
    return lambda text: record_property("seen", text)


@pytest.fixture
def counted(record_property: Callable[[str, Any], None], request: pytest.FixtureRequest) -> Callable[..., None]:
    """Gives the table one of a count, called after the test's last assertion.

    `counted("kinds of data", kind)` counts kinds that differ; `counted("runs")` counts tests.
    """
    return lambda text, one="": record_property("counted", (text, one or request.node.nodeid))


@pytest.fixture
def measured(record_property: Callable[[str, Any], None]) -> Callable[[str, float], None]:
    """Gives the table a figure, which it prints from the least to the most: `measured("after {:.0f} s", seconds)`."""
    return lambda text, figure: record_property("measured", (text, figure))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _skipped.append(report.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.nodeid not in _tests:
        return
    if report.skipped:
        _skipped.append(report.nodeid)
    _reports.setdefault(report.nodeid, []).append(report)
    if report.when == "teardown":  # so that a call that is stopped loses one test
        _store(report.nodeid, _reports.pop(report.nodeid))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if session.config.getoption("--rows") is None:
        return
    if _skipped and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    elif _tests and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK  # all have passed before


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.getoption("--rows")
    if rows is None:
        return
    terminalreporter.section("what holds")
    for row in rows:
        terminalreporter.write_line(_line(row, ROWS[row]))
    for name in _skipped:
        terminalreporter.write_line(f"skipped, so nothing is shown: {name}")


_reports: dict[str, list[pytest.TestReport]] = {}
_tests: dict[str, tuple[str, Path]] = {}  # row and file of each
_skipped: list[str] = []


def _rows(names: str) -> list[str]:
    """The rows whose names have one of these parts, in the order of the table."""
    parts = [name.strip() for name in names.split(",")] if names.strip() else [""]
    for part in parts:
        if not any(part in row for row in ROWS) or (len(parts) > 1 and not part):
            raise argparse.ArgumentTypeError(f"no row's name has {part!r} in it; the rows are: {'; '.join(ROWS)}")
    return [row for row in ROWS if any(part in row for part in parts)]


def _part(text: str) -> tuple[int, int] | None:
    """The number of the part and the number of parts."""
    if not text:
        return None
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part such as 1/2, 2/2 or 3/4")
    return int(found[1]), int(found[2])


def _row(item: pytest.Item) -> str:
    mark = item.get_closest_marker("row")
    return str(mark.args[0]) if mark and mark.args else OTHERS


def _store(name: str, reports: list[pytest.TestReport]) -> None:
    """Keep what was seen of a test that came to its end."""
    found = {
        "passed": all(report.passed for report in reports),
        "seconds": round(sum(report.duration for report in reports), 1),
        "said": [list(each) for each in reports[-1].user_properties],
        "digest": _digest(_tests[name][1]),
    }
    STORE.parent.mkdir(exist_ok=True)
    with STORE.with_suffix(".lock").open("w") as lock:  # of the processes of `-n 2`
        fcntl.flock(lock, fcntl.LOCK_EX)
        new = STORE.with_suffix(".new")
        new.write_text(json.dumps(_stored() | {name: found}, indent=1) + "\n")
        new.replace(STORE)


def _line(row: str, bar: str) -> str:
    stored = _stored()
    of_row = {name: path for name, (of, path) in _tests.items() if of == row}
    passed = [stored[name] for name, path in of_row.items() if _passed(stored.get(name), path)]
    what = "; ".join(_what([(kind, value) for each in passed for kind, value in each["said"]]))
    what = what if len(what) <= LONGEST else f"{what[:LONGEST]} ..."
    took = sum(each["seconds"] for each in passed)
    state = f"{len(passed)} of {len(of_row)} tests passed, in {took:.0f} s" if of_row else "no test"
    return f"{row}: {state} | {bar}" + (f" | {what}" if what else "")


def _what(said: list[tuple[str, Any]]) -> list[str]:
    """Measurements of the tests that passed: counts, then figures, then words."""
    counts, figures = defaultdict[str, set[str]](set), defaultdict[str, list[float]](list)
    for text, one in (value for kind, value in said if kind == "counted"):
        counts[text].add(one)
    for text, figure in (value for kind, value in said if kind == "measured"):
        figures[text].append(figure)
    words = dict.fromkeys(text for kind, text in said if kind == "seen")
    return [
        *(f"{len(each)} {text}" for text, each in counts.items()),
        *(_with_range(text, each) for text, each in figures.items()),
        *words,
    ]


def _with_range(text: str, figures: list[float]) -> str:
    before, form, after = re.split("({.*})", text)
    least, most = form.format(min(figures)), form.format(max(figures))
    return before + (least if least == most else f"{least} to {most}") + after


def _stored() -> dict[str, dict[str, Any]]:
    return json.loads(STORE.read_text()) if STORE.is_file() else {}


def _passed(stored: dict[str, Any] | None, path: Path) -> bool:
    """Whether a test passed with the code of now."""
    return stored is not None and stored["passed"] and stored["digest"] == _digest(path)


@cache
def _digest(path: Path) -> str:
    """Digest of all that a test of this file depends on."""
    of_code = (file for name in CODE for place in PROJECT.glob(name) for file in (place, *place.rglob("*")))
    files = [file for file in of_code if file.is_file() and file.suffix != ".pyc"]
    return _sha256([*files, *_with_helpers([*SHARED, path])])


def _sha256(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in sorted(set(files)):
        digest.update(f"{file.relative_to(PROJECT)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _with_helpers(files: list[Path]) -> set[Path]:
    """These files of `tests`, those that they name, and so on."""
    found, left = set[Path](), [file for file in files if file.is_file()]
    while left:
        file = left.pop()
        if file not in found:
            found.add(file)
            left += _named_by(file)
    return found


@cache
def _named_by(file: Path) -> list[Path]:
    """The modules of `tests` and `benchmarks` that a file imports or names, by their place or its neighbour's name."""
    found = []
    for name in _names(file):
        parts = [part for part in name.split(".") if part]
        place = PROJECT if parts[0] in ("tests", "benchmarks") else file.parent
        modules = [place.joinpath(*parts[:count]) for count in range(1, len(parts) + 1)]
        found += [each for module in modules for each in (module.with_suffix(".py"), module / "__init__.py")]
    return [module for module in dict.fromkeys(found) if module.is_file()]


def _names(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.Constant(value=str(text)):
                yield from re.findall(r"\w+\.[\w.]*", text)
