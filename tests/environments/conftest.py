"""The hosts on which the code of an environment runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlflow.environments.host import Host, InProcess
from rlflow.worker import Limits, Worker


@pytest.fixture(autouse=True)
def games_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])


@pytest.fixture(params=["in the process", "in a worker"])
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    host: Host = InProcess() if request.param == "in the process" else Worker(Limits(timeout_s=30))
    yield host
    host.close()
