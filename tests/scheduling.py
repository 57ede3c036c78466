"""With several workers (`pytest -n 2`), which tests run in one of them, and which start first.

A fixture of a module is made in every worker that runs a test of the module, so the tests of a file stay together. All
of `tests/device` is together, since its ranks start slowly. Files that take long start first: one that starts last
keeps one worker busy while the others are done. `--store-seconds` writes what files took into `seconds.json`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

SECONDS = Path(__file__).parent / "seconds.json"
TOGETHER = "tests/device"
LONG_S = 10  # the order of shorter files does not matter


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--store-seconds", action="store_true", help="write what each file took into tests/seconds.json")


@pytest.hookimpl(optionalhook=True)  # xdist's; its own `--dist loadgroup` does nothing under pytest 9.2
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FilesTogether:
    return FilesTogether(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # this is one of several workers
        seconds: dict[str, float] = json.loads(SECONDS.read_text())
        items.sort(key=lambda item: -seconds.get(group(item.nodeid), 0.0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.option.store_seconds:
        took: dict[str, float] = defaultdict(float)
        for report in (report for kind in terminalreporter.stats.values() for report in kind):
            if isinstance(report, pytest.TestReport):
                took[group(report.nodeid)] += report.duration
        known = json.loads(SECONDS.read_text()) | {name: round(seconds) for name, seconds in took.items()}
        long = {name: seconds for name, seconds in sorted(known.items()) if seconds >= LONG_S and Path(name).exists()}
        SECONDS.write_text(json.dumps(long, indent=2) + "\n")


class FilesTogether(LoadScopeScheduling):
    """Gives a worker that is free the next group of tests, in the order of their collection."""

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # which orders by the number of tests

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)


def group(nodeid: str) -> str:
    """What runs in one worker: a file, or a folder whose tests share ranks."""
    file = nodeid.partition("::")[0]
    return TOGETHER if file.startswith(f"{TOGETHER}/") else file
